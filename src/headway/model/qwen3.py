"""Qwen 3: every head of queries and keys is normed before it is rotated (Yang et al. 2025)."""

from __future__ import annotations

from headway.model.blocks import Weights, attention, by_layer, embed, gated_mlp, logits, normed_qk, qkv
from headway.model.checkpoint import Checkpoint
from headway.model.config import DecoderConfig, Dialect, decoder_config, has_attention_biases
from headway.model.family import Decoder, decoder_of
from headway.model.tensors import LAYER, O_BIAS, QK_NORMS, QKV_BIASES
from headway.ops.protocol import Forward, Ops, Tensor


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    config = decoder_config(checkpoint, Dialect(understood=frozenset({"sliding_window"})))
    biases = QKV_BIASES | O_BIAS if has_attention_biases(checkpoint) else {}
    return decoder_of(checkpoint, config, LAYER | QK_NORMS | biases, build)


def build(config: DecoderConfig, weights: Weights) -> Forward:
    """The forward pass over prepared weights by role."""
    layers = by_layer(weights, config.layers)

    def forward(ops: Ops) -> Tensor:
        x = embed(ops, weights, config)
        for layer, w in enumerate(layers):
            q, k, v = qkv(ops, x, w, config)
            q, k = normed_qk(ops, q, k, w, config)
            x = attention(ops, x, q, k, v, w, layer, config, config.rope)
            x = gated_mlp(ops, x, w, config)
        return logits(ops, x, weights, config)

    return forward
