"""Layers whose attention and MLP read the same x, through one norm or each its own (Wang and Komatsuzaki, 2021)."""

from __future__ import annotations

from headway.model.blocks import Weights, attend, forward_pass, mlp, norm
from headway.model.config import DecoderConfig
from headway.ops.protocol import Forward, Ops, Tensor


def build(config: DecoderConfig, weights: Weights) -> Forward:
    """The forward pass over prepared weights by role."""

    def block(ops: Ops, x: Tensor, w: Weights, layer: int) -> Tensor:
        h = norm(ops, x, w, "attention_norm", config)
        attended = attend(ops, h, w, layer, config, residual=x)
        return mlp(ops, norm(ops, x, w, "mlp_norm", config) if "mlp_norm" in w else h, w, config, residual=attended)

    return forward_pass(config, weights, block)
