"""Gemma 4: windows and full layers of different head widths, caches shared by the last layers, embeddings per layer.

The last `num_kv_shared_layers` layers attend to the cache of the last earlier layer of their kind and store none. The
small checkpoints add an embedding table per layer, gathered like the first one; the mixture runs its experts beside a
dense MLP in every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from headway.core.fields import Fields
from headway.shape.family import NORMS_4
from headway.shape.model import KVGroup
from headway.shape.tensors import Dims, Tensor

GLOBAL_HEAD = 512  # width of a full layer's heads where the config does not say


class LayerShape(NamedTuple):
    """One layer's attention: kind, query heads' width, key/value heads, whether keys are also the values."""

    kind: str
    head: int
    kv_heads: int
    shared_values: bool
    stores: bool


def layer_shapes(fields: Fields, size: Dims) -> list[LayerShape]:
    """Attention of each layer, from `layer_types` and either `per_layer_config` or the `global_*` keys."""
    words = fields.words("layer_types", size.layers)
    if words is None:
        words = ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(size.layers)]
    changes = fields.group("per_layer_config")
    by_layer = {index.lstrip("0") or "0": changes.group(index) for index in changes.values}  # keys such as "05"
    first_shared = size.layers - (fields.maybe("num_kv_shared_layers") or 0)
    shapes = []
    for layer, word in enumerate(words):
        full = word == "full_attention"
        own = by_layer.get(str(layer), changes.group(""))
        head = own.maybe("head_dim") or (fields.maybe("global_head_dim") or GLOBAL_HEAD if full else size.head)
        kv_heads = own.maybe("num_key_value_heads") or (
            fields.maybe("num_global_key_value_heads") if full else None) or size.kv_heads  # fmt: skip
        same = full and fields.flag("attention_k_eq_v")
        shapes.append(LayerShape("full" if full else "window", head, kv_heads, same, layer < first_shared))
    return shapes


def tensors(fields: Fields, size: Dims) -> Iterator[Tensor]:
    """Every tensor, in the names of the published checkpoints."""
    d, per_layer = size.d, fields.maybe("hidden_size_per_layer_input") or 0
    yield Tensor("model.embed_tokens.weight", (size.vocab, d), "embed")
    yield Tensor("model.norm.weight", (d,), "norm")
    if per_layer:
        table = fields.size("vocab_size_per_layer_input", default=size.vocab)
        yield Tensor("model.embed_tokens_per_layer.weight", (table, size.layers * per_layer), "gathered")
        yield Tensor("model.per_layer_model_projection.weight", (size.layers * per_layer, d), "mlp")
        yield Tensor("model.per_layer_projection_norm.weight", (per_layer,), "norm")
    mixture = fields.flag("enable_moe_block")
    for layer, shape in enumerate(layer_shapes(fields, size)):
        at = f"model.layers.{layer}."
        norms = [*dict(NORMS_4).values(), *(["post_per_layer_input_norm"] if per_layer else [])]
        if mixture:
            norms += ["post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"]
        yield from (Tensor(f"{at}{name}.weight", (d,), "norm") for name in norms)
        yield Tensor(at + "layer_scalar", (1,), "norm")
        yield from attention(at + "self_attn.", shape, size)
        wide = 2 if fields.flag("use_double_wide_mlp") and not shape.stores else 1
        for name in ("gate_proj", "up_proj"):
            yield Tensor(f"{at}mlp.{name}.weight", (size.ffn * wide, d), "mlp")
        yield Tensor(at + "mlp.down_proj.weight", (d, size.ffn * wide), "mlp")
        if per_layer:
            yield Tensor(at + "per_layer_input_gate.weight", (per_layer, d), "mlp")
            yield Tensor(at + "per_layer_projection.weight", (d, per_layer), "mlp")
        if mixture:
            yield from _experts(at, fields, d)


def attention(at: str, shape: LayerShape, size: Dims) -> Iterator[Tensor]:
    """Of one layer; one that shares a cache makes queries only."""
    query, kv = size.heads * shape.head, shape.kv_heads * shape.head
    yield Tensor(at + "q_proj.weight", (query, size.d), "attention")
    yield Tensor(at + "q_norm.weight", (shape.head,), "norm")
    yield Tensor(at + "o_proj.weight", (size.d, query), "attention")
    if shape.stores:
        yield Tensor(at + "k_proj.weight", (kv, size.d), "attention")
        yield Tensor(at + "k_norm.weight", (shape.head,), "norm")
        if not shape.shared_values:
            yield Tensor(at + "v_proj.weight", (kv, size.d), "attention")


def _experts(at: str, fields: Fields, d: int) -> Iterator[Tensor]:
    experts, ffn = fields.size("num_experts"), fields.size("moe_intermediate_size")
    yield Tensor(at + "router.proj.weight", (experts, d), "router")
    yield Tensor(at + "router.scale", (d,), "router")
    yield Tensor(at + "router.per_expert_scale", (experts,), "router")
    yield Tensor(at + "experts.gate_up_proj", (experts, 2 * ffn, d), "experts")
    yield Tensor(at + "experts.down_proj", (experts, d, ffn), "experts")


def sparse(fields: Fields, size: Dims) -> list[bool]:
    return [fields.flag("enable_moe_block")] * size.layers


def groups(fields: Fields, size: Dims, kv_bytes: float) -> tuple[KVGroup, ...]:
    return sharing_groups(fields, size, layer_shapes(fields, size), kv_bytes)


def sharing_groups(fields: Fields, size: Dims, shapes: list[LayerShape], kv_bytes: float) -> tuple[KVGroup, ...]:
    """One group per kind: layers that store, and how many more read what they stored."""
    found = []
    for kind in dict.fromkeys(shape.kind for shape in shapes):
        of_kind = [(layer, shape) for layer, shape in enumerate(shapes) if shape.kind == kind]
        stored = tuple(layer for layer, shape in of_kind if shape.stores)
        if not stored:
            raise fields.fault("num_kv_shared_layers", f"no {kind} layer is left to store what others share")
        shape = of_kind[0][1]
        flops = 4.0 * size.heads * shape.head
        found.append(KVGroup(
            kind, stored, shape.kv_heads, shape.head, shape.head, dtype_bytes=kv_bytes,
            window=fields.size("sliding_window") if kind == "window" else None,
            readers=len(of_kind) - len(stored), decode_flops=flops, prefill_flops=flops,
        ))  # fmt: skip
    return tuple(found)
