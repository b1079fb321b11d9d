"""What forward passes are put together from. `w`: a layer's weights by role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.model.config import DecoderConfig
from headway.ops.protocol import Ops, Prepared, Rope, Tensor

Weights = Mapping[str, Prepared]


def by_layer(weights: Weights, layers: int) -> Sequence[Weights]:
    """The weights of each layer, by role within it."""
    split: list[dict[str, Prepared]] = [{} for _ in range(layers)]
    for role, weight in weights.items():
        layer, dot, rest = role.partition(".")
        if dot:
            split[int(layer)][rest] = weight
    return split


def qkv(ops: Ops, x: Tensor, w: Weights, config: DecoderConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the normed x."""
    h = ops.rms_norm(x, w["attention_norm"], config.norm_eps)
    q, k, v = (ops.linear(h, w[role], w.get(f"{role}_bias")) for role in "qkv")
    return q, k, v


def attention(
    ops: Ops, x: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Weights, layer: int, config: DecoderConfig, rope: Rope
) -> Tensor:
    """x + what the rotated queries find in the cache, keys and values of this step included. A row-parallel rank's
    `residual` is added on one rank only, so that `all_reduce` sums it once."""
    q = ops.rope_and_cache(q, k, v, layer, rope)
    attended = ops.attention(q, layer, config.head_dim**-0.5)
    return ops.all_reduce(ops.linear(attended, w["o"], w.get("o_bias"), residual=x))


def gated_mlp(ops: Ops, x: Tensor, w: Weights, config: DecoderConfig) -> Tensor:
    """x + the gated MLP of the normed x."""
    h = ops.rms_norm(x, w["mlp_norm"], config.norm_eps)
    return ops.all_reduce(ops.gated_mlp(h, w["gate"], w["up"], w["down"], config.activation, residual=x))


def logits(ops: Ops, x: Tensor, weights: Weights, config: DecoderConfig) -> Tensor:
    """Logits of the rows that are wanted."""
    x = ops.rms_norm(ops.logit_rows(x), weights["norm"], config.norm_eps)
    return ops.logits(x, weights["embed" if config.tied else "head"])
