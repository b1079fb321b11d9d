"""OLMo 2: norms behind attention and MLP instead of before, and over all queries and all keys (OLMo team, 2025)."""

from __future__ import annotations

from dataclasses import replace

from headway.model.blocks import Weights, attend, forward_pass, mlp
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions, DecoderConfig, decoder_config, stated
from headway.model.family import Decoder, decoder_of
from headway.model.rope import inverse_frequencies, rope
from headway.ops.protocol import Forward, Ops, Tensor

IN_GGUF = Conventions(  # where an OLMo 3 is an OLMo 2 with windows
    understood=frozenset({"sliding_window"}),
    gguf={
        "attention.sliding_window": "sliding_window", "attention.sliding_window_pattern": "sliding_window_pattern",
        "rope.freq_base": "rope_theta",
    },
)  # fmt: skip


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    conventions = IN_GGUF if checkpoint.gguf else Conventions()
    config, fields = decoder_config(checkpoint, conventions), stated(checkpoint, conventions)
    if config.windowed:  # whose rope is never scaled
        theta = fields.number("rope_theta", 10000.0)
        config = replace(config, local_rope=rope(inverse_frequencies(config.head_dim, theta)))
    return decoder_of(checkpoint, fields, config, build)


def build(config: DecoderConfig, weights: Weights) -> Forward:
    """The forward pass over prepared weights by role."""

    def block(ops: Ops, x: Tensor, w: Weights, layer: int) -> Tensor:
        attended = attend(ops, x, w, layer, config)
        x = ops.rms_norm(attended, w["attention_post_norm"], config.norm_eps, residual=x)
        return ops.rms_norm(mlp(ops, x, w, config), w["mlp_post_norm"], config.norm_eps, residual=x)

    return forward_pass(config, weights, block)
