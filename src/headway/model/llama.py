"""Llama (2, 3, 3.1, 3.2) and what has its shape (SmolLM, TinyLlama and others).

Pre-norm blocks of grouped-query attention with rotary positions and a SiLU-gated MLP (Touvron et al. 2023; Grattafiori
et al. 2024).
"""

from __future__ import annotations

from typing import Any

from headway.model.blocks import Weights, attention, forward_pass, gated_mlp
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions, DecoderConfig
from headway.model.family import Decoder, common_decoder
from headway.ops.protocol import Forward, Ops, Tensor

CONVENTIONS = Conventions(understood=frozenset({"mlp_bias"}), gguf_interleaved=True)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    return common_decoder(checkpoint, CONVENTIONS, build)


def config_json(config: DecoderConfig) -> dict[str, Any]:
    """What the config.json of a Llama says."""
    return {
        "model_type": "llama", "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied,
    }  # fmt: skip


def build(config: DecoderConfig, weights: Weights) -> Forward:
    """The forward pass over prepared weights by role."""

    def block(ops: Ops, x: Tensor, w: Weights, layer: int) -> Tensor:
        x = attention(ops, x, w, layer, config)
        return gated_mlp(ops, x, w, config)

    return forward_pass(config, weights, block)
