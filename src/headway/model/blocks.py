"""What forward passes are put together from. `w`: a layer's weights by role."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from headway.model.config import DecoderConfig
from headway.ops.protocol import Forward, Ops, Prepared, Tensor

Weights = Mapping[str, Prepared]


def by_layer(weights: Weights, layers: int) -> Sequence[Weights]:
    """The weights of each layer, by role within it."""
    split: list[dict[str, Prepared]] = [{} for _ in range(layers)]
    for role, weight in weights.items():
        layer, dot, rest = role.partition(".")
        if dot:
            split[int(layer)][rest] = weight
    return split


def forward_pass(
    config: DecoderConfig, weights: Weights, block: Callable[[Ops, Tensor, Weights, int], Tensor]
) -> Forward:
    """Embedding, layers, last norm, logits. block: (operations, x, the layer's weights, its number) -> x behind it."""
    layers = by_layer(weights, config.layers)

    def forward(ops: Ops) -> Tensor:
        x = embed(ops, weights, config)
        for layer, w in enumerate(layers):
            x = block(ops, x, w, layer)
        ops.pooled(norm(ops, ops.pool_rows(x), weights, "norm", config))
        return logits(ops, x, weights, config)

    return forward


def embed(ops: Ops, weights: Weights, config: DecoderConfig) -> Tensor:
    """The step's tokens, and their positions if the model has a table of them."""
    return ops.embed(weights["embed"], config.embedding_scale, weights.get("positions"))


def norm(ops: Ops, x: Tensor, w: Weights, role: str, config: DecoderConfig, heads: int = 1) -> Tensor:
    """x, normed in the family's way by the weights of `role`. heads: that are normed one by one."""
    if config.layer_norms:
        return ops.layer_norm(x, w[role], w.get(f"{role}_bias"), config.norm_eps, heads)
    return ops.rms_norm(x, w[role], config.norm_eps)


def projections(ops: Ops, h: Tensor, w: Weights, config: DecoderConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of h; queries and keys normed, each head or all at once, if the layer has such norms."""
    q, k, v = (ops.linear(h, w[role], w.get(f"{role}_bias")) for role in "qkv")
    if "q_norm" in w:
        q, k = norm(ops, q, w, "q_norm", config, config.heads), norm(ops, k, w, "k_norm", config, config.kv_heads)
    return q, k, v


def attend(
    ops: Ops,
    h: Tensor,
    w: Weights,
    layer: int,
    config: DecoderConfig,
    residual: Tensor | None = None,
) -> Tensor:
    """What the rotated queries of h find in the cache, keys and values of this step included (+ residual). A
    row-parallel rank's `residual` is added on one rank only, so that `all_reduce` sums it once."""
    q, k, v = projections(ops, h, w, config)
    q = ops.rope_and_cache(q, k, v, layer, config.rope_of(layer))
    attended = ops.attention(q, layer, config.scale_of(layer), config.score_softcap, w.get("sinks"))
    return ops.all_reduce(ops.linear(attended, w["o"], w.get("o_bias"), residual))


def attention(ops: Ops, x: Tensor, w: Weights, layer: int, config: DecoderConfig) -> Tensor:
    """x + what the normed x finds in the cache."""
    return attend(ops, norm(ops, x, w, "attention_norm", config), w, layer, config, residual=x)


def mlp(ops: Ops, h: Tensor, w: Weights, config: DecoderConfig, residual: Tensor | None = None) -> Tensor:
    """The MLP of h, gated if it has gates (+ residual)."""
    if "gate" not in w:
        hidden = ops.activate(ops.linear(h, w["up"], w.get("up_bias")), config.activation)
        return ops.all_reduce(ops.linear(hidden, w["down"], w.get("down_bias"), residual))
    biases = (w.get(f"{role}_bias") for role in ("gate", "up", "down"))
    return ops.all_reduce(ops.gated_mlp(h, w["gate"], w["up"], w["down"], config.activation, residual, *biases))


def gated_mlp(ops: Ops, x: Tensor, w: Weights, config: DecoderConfig) -> Tensor:
    """x + the MLP of the normed x."""
    return mlp(ops, norm(ops, x, w, "mlp_norm", config), w, config, residual=x)


def logits(ops: Ops, x: Tensor, weights: Weights, config: DecoderConfig) -> Tensor:
    """Logits of the rows that are wanted."""
    x = norm(ops, ops.logit_rows(x), weights, "norm", config)
    head, bias = weights["embed" if config.tied else "head"], weights.get("head_bias")
    return ops.logits(x, head, config.logit_scale, config.logit_softcap, bias)
