"""Llama 4: three layers in four attend within chunks, mixtures (with one shared expert) alternate with wide MLPs."""

from __future__ import annotations

from collections.abc import Iterator

from headway.core.fields import Fields
from headway.shape.model import KVGroup
from headway.shape.tensors import Dims, Tensor

FULL_EVERY = 4  # without rotary positions, over the whole context


def sparse(fields: Fields, size: Dims) -> list[bool]:
    """Which layers have routed experts."""
    step = fields.size("interleave_moe_layer_step", default=1)
    listed = fields.values.get("moe_layers")
    if listed is None:
        listed = range(step - 1, size.layers, step)
    elif not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        raise fields.fault("moe_layers", "not a list of layers")
    return [layer in listed for layer in range(size.layers)]


def _chunked(fields: Fields, size: Dims) -> list[bool]:
    """Which layers attend within their chunk only."""
    if words := fields.words("layer_types", size.layers):
        return [word == "chunked_attention" for word in words]
    rotary = fields.values.get("no_rope_layers")
    if rotary:
        if not isinstance(rotary, list) or len(rotary) != size.layers:
            raise fields.fault("no_rope_layers", f"not a list of {size.layers} numbers")
        return [bool(flag) for flag in rotary]
    every = fields.size("no_rope_layer_interval", default=FULL_EVERY)
    return [(layer + 1) % every != 0 for layer in range(size.layers)]


def tensors(fields: Fields, size: Dims) -> Iterator[Tensor]:
    """Every tensor, in the names of the published checkpoints."""
    d, q, kv = size.d, size.heads * size.head, size.kv_heads * size.head
    yield Tensor("model.embed_tokens.weight", (size.vocab, d), "embed")
    yield Tensor("model.norm.weight", (d,), "norm")
    if not size.tied:
        yield Tensor("lm_head.weight", (size.vocab, d), "head")
    experts, wide = fields.size("num_local_experts"), fields.size("intermediate_size_mlp")
    for layer, routed in enumerate(sparse(fields, size)):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield Tensor(f"{at}{name}.weight", (d,), "norm")
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield Tensor(f"{at}self_attn.{name}_proj.weight", (rows, d), "attention")
        yield Tensor(at + "self_attn.o_proj.weight", (d, q), "attention")
        at += "feed_forward."
        if routed:
            yield Tensor(at + "router.weight", (experts, d), "router")
            yield Tensor(at + "experts.gate_up_proj", (experts, d, 2 * size.ffn), "experts")
            yield Tensor(at + "experts.down_proj", (experts, size.ffn, d), "experts")
        part, ffn = ("shared", size.ffn) if routed else ("mlp", wide)
        at += "shared_expert." if routed else ""
        for name in ("gate_proj", "up_proj"):
            yield Tensor(f"{at}{name}.weight", (ffn, d), part)
        yield Tensor(at + "down_proj.weight", (d, ffn), part)


def groups(fields: Fields, size: Dims, kv_bytes: float) -> tuple[KVGroup, ...]:
    """Chunks are kept as windows: what a token reads is at most its own chunk."""
    chunked = _chunked(fields, size)
    flops = 4.0 * size.heads * size.head
    return tuple(
        KVGroup(
            "window" if local else "full", layers, size.kv_heads, size.head, size.head, dtype_bytes=kv_bytes,
            window=fields.size("attention_chunk_size") if local else None, decode_flops=flops, prefill_flops=flops,
        )
        for local in (True, False)
        if (layers := tuple(layer for layer, this in enumerate(chunked) if this == local))
    )  # fmt: skip
