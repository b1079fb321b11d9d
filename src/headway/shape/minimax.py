"""MiniMax Text 01 and M1: seven layers in eight keep a state (lightning attention), all are mixtures."""

from __future__ import annotations

from collections.abc import Iterator

from headway.core.fields import Fields
from headway.shape.model import STATE_BYTES, KVGroup
from headway.shape.tensors import Dims, Tensor


def _kinds(fields: Fields, size: Dims) -> list[str]:
    words = fields.words("layer_types", size.layers)
    if words is None:
        return ["state" if layer % 2 else "full" for layer in range(size.layers)]
    return ["full" if word == "full_attention" else "state" for word in words]


def sparse(fields: Fields, size: Dims) -> list[bool]:
    return [True] * size.layers


def tensors(fields: Fields, size: Dims) -> Iterator[Tensor]:
    """Every tensor, in the names of the published checkpoints."""
    d, q, kv = size.d, size.heads * size.head, size.kv_heads * size.head
    experts, ffn = fields.size("num_local_experts"), size.ffn
    yield Tensor("model.embed_tokens.weight", (size.vocab, d), "embed")
    yield Tensor("model.norm.weight", (d,), "norm")
    if not size.tied:
        yield Tensor("lm_head.weight", (size.vocab, d), "head")
    for layer, kind in enumerate(_kinds(fields, size)):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield Tensor(f"{at}{name}.weight", (d,), "norm")
        if kind == "state":
            yield Tensor(at + "self_attn.qkv_proj.weight", (3 * q, d), "attention")
            yield Tensor(at + "self_attn.output_gate.weight", (q, d), "attention")
            yield Tensor(at + "self_attn.out_proj.weight", (d, q), "attention")
            yield Tensor(at + "self_attn.norm.weight", (q,), "norm")
        else:
            for name, shape in (("q", (q, d)), ("k", (kv, d)), ("v", (kv, d)), ("o", (d, q))):
                yield Tensor(f"{at}self_attn.{name}_proj.weight", shape, "attention")
        at += "block_sparse_moe."
        yield Tensor(at + "gate.weight", (experts, d), "router")
        for name, shape in (("w1", (ffn, d)), ("w2", (d, ffn)), ("w3", (ffn, d))):
            yield Tensor(f"{at}experts.{{}}.{name}.weight", shape, "experts", experts)


def groups(fields: Fields, size: Dims, kv_bytes: float) -> tuple[KVGroup, ...]:
    """A head x head matrix per head (decayed, added to, read: about 5 FLOPs per number), or keys and values."""
    kinds, head = _kinds(fields, size), size.head
    states = tuple(layer for layer, kind in enumerate(kinds) if kind == "state")
    full = tuple(layer for layer, kind in enumerate(kinds) if kind == "full")
    linear, pair = 5.0 * size.heads * head * head, 4.0 * size.heads * head
    return (
        *((KVGroup("state", states, size.heads, head * head, 0, dtype_bytes=STATE_BYTES, decode_flops=linear,
                   prefill_flops=linear),) if states else ()),
        *((KVGroup("full", full, size.kv_heads, head, head, dtype_bytes=kv_bytes, decode_flops=pair,
                   prefill_flops=pair),) if full else ()),
    )  # fmt: skip
