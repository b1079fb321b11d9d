"""Llama (2, 3, 3.1, 3.2) and what has its shape (SmolLM, TinyLlama and others).

Pre-norm blocks of grouped-query attention with rotary positions and a SiLU-gated MLP (Touvron et al. 2023; Grattafiori
et al. 2024).
"""

from __future__ import annotations

from headway.model.blocks import Weights, attention, by_layer, embed, gated_mlp, logits
from headway.model.checkpoint import Checkpoint
from headway.model.config import DecoderConfig, Dialect, decoder_config, has_mlp_biases
from headway.model.family import Decoder, decoder_of
from headway.model.tensors import LAYER, MLP_BIASES, TensorSpec, attention_biases
from headway.ops.protocol import Forward, Ops, Tensor

DIALECT = Dialect(understood=frozenset({"mlp_bias"}), gguf_interleaved=True)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    config = decoder_config(checkpoint, DIALECT)
    return decoder_of(checkpoint, config, layer_of(checkpoint), build)


def layer_of(checkpoint: Checkpoint) -> dict[str, TensorSpec]:
    """A layer's tensors, with the biases that the checkpoint has."""
    return LAYER | attention_biases(checkpoint) | (MLP_BIASES if has_mlp_biases(checkpoint) else {})


def build(config: DecoderConfig, weights: Weights) -> Forward:
    """The forward pass over prepared weights by role."""
    layers = by_layer(weights, config.layers)

    def forward(ops: Ops) -> Tensor:
        x = embed(ops, weights, config)
        for layer, w in enumerate(layers):
            x = attention(ops, x, w, layer, config)
            x = gated_mlp(ops, x, w, config)
        return logits(ops, x, weights, config)

    return forward
