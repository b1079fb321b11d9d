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


def embed(ops: Ops, weights: Weights, config: DecoderConfig) -> Tensor:
    """The step's tokens."""
    return ops.embed(weights["embed"], config.embedding_scale)


def projections(ops: Ops, h: Tensor, w: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of h."""
    q, k, v = (ops.linear(h, w[role], w.get(f"{role}_bias")) for role in "qkv")
    return q, k, v


def qkv(ops: Ops, x: Tensor, w: Weights, config: DecoderConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the normed x."""
    return projections(ops, ops.rms_norm(x, w["attention_norm"], config.norm_eps), w)


def normed_qk(ops: Ops, q: Tensor, k: Tensor, w: Weights, config: DecoderConfig) -> tuple[Tensor, Tensor]:
    """Queries and keys, normed before they are rotated: each head, or all at once."""
    return ops.rms_norm(q, w["q_norm"], config.norm_eps), ops.rms_norm(k, w["k_norm"], config.norm_eps)


def attend(
    ops: Ops,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Weights,
    layer: int,
    config: DecoderConfig,
    rope: Rope,
    residual: Tensor | None = None,
) -> Tensor:
    """What the rotated queries find in the cache, keys and values of this step included (+ residual). A row-parallel
    rank's `residual` is added on one rank only, so that `all_reduce` sums it once."""
    q = ops.rope_and_cache(q, k, v, layer, rope)
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    attended = ops.attention(q, layer, scale, config.score_softcap, w.get("sinks"))
    return ops.all_reduce(ops.linear(attended, w["o"], w.get("o_bias"), residual))


def attention(
    ops: Ops, x: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Weights, layer: int, config: DecoderConfig, rope: Rope
) -> Tensor:
    """x + what the rotated queries find in the cache."""
    return attend(ops, q, k, v, w, layer, config, rope, residual=x)


def mlp(ops: Ops, h: Tensor, w: Weights, config: DecoderConfig, residual: Tensor | None = None) -> Tensor:
    """The gated MLP of h (+ residual)."""
    biases = (w.get(f"{role}_bias") for role in ("gate", "up", "down"))
    return ops.all_reduce(ops.gated_mlp(h, w["gate"], w["up"], w["down"], config.activation, residual, *biases))


def gated_mlp(ops: Ops, x: Tensor, w: Weights, config: DecoderConfig) -> Tensor:
    """x + the gated MLP of the normed x."""
    return mlp(ops, ops.rms_norm(x, w["mlp_norm"], config.norm_eps), w, config, residual=x)


def logits(ops: Ops, x: Tensor, weights: Weights, config: DecoderConfig) -> Tensor:
    """Logits of the rows that are wanted."""
    x = ops.rms_norm(ops.logit_rows(x), weights["norm"], config.norm_eps)
    return ops.logits(x, weights["embed" if config.tied else "head"], config.logit_scale, config.logit_softcap)
