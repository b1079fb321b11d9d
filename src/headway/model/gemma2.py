"""Gemma 2: norms before and behind attention and MLP, capped scores and logits, and a window in every other layer
(Gemma team, 2024)."""

from __future__ import annotations

from dataclasses import replace

from headway.model.blocks import Weights, attend, forward_pass, mlp
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions, DecoderConfig, decoder_config, optional_number, stated
from headway.model.family import Decoder, decoder_of
from headway.ops.protocol import Forward, Ops, Tensor

SCALED_BY_WIDTH = 46  # layers of the 27B, whose GGUF has to be told from the others' by them
CONVENTIONS = Conventions(
    understood=frozenset(
        {"sliding_window", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}
    ),
    gguf={
        "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
        "attention.sliding_window": "sliding_window",
    },
)  # fmt: skip


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    config = scaled(checkpoint, decoder_config(checkpoint, CONVENTIONS), CONVENTIONS, SCALED_BY_WIDTH)
    fields = stated(checkpoint, CONVENTIONS)
    config = replace(config, score_softcap=optional_number(fields, "attn_logit_softcapping", 0.0))
    return decoder_of(checkpoint, fields, config, build, norms_less_one=not checkpoint.gguf)


def scaled(
    checkpoint: Checkpoint, config: DecoderConfig, conventions: Conventions, scaled_by_width: int
) -> DecoderConfig:
    """The config with the scales of a Gemma. A GGUF does not say that of scores: it is that of a head's width, but of
    the model's width per head in the one model with so many layers (as in llama.cpp)."""
    fields = stated(checkpoint, conventions)
    own = config.hidden_size // config.heads if config.layers == scaled_by_width else config.head_dim
    return replace(
        config,
        embedding_scale=config.hidden_size**0.5,
        attention_scale=(own if checkpoint.gguf else fields.number("query_pre_attn_scalar", 256)) ** -0.5,
        logit_softcap=optional_number(fields, "final_logit_softcapping", 0.0),
    )


def build(config: DecoderConfig, weights: Weights) -> Forward:
    """The forward pass over prepared weights by role."""

    def block(ops: Ops, x: Tensor, w: Weights, layer: int) -> Tensor:
        h = ops.rms_norm(x, w["attention_norm"], config.norm_eps)
        attended = attend(ops, h, w, layer, config)
        x = ops.rms_norm(attended, w["attention_post_norm"], config.norm_eps, residual=x)
        h = ops.rms_norm(x, w["mlp_norm"], config.norm_eps)
        return ops.rms_norm(mlp(ops, h, w, config), w["mlp_post_norm"], config.norm_eps, residual=x)

    return forward_pass(config, weights, block)
