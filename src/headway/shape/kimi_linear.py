"""Kimi Linear: three layers in four keep a state (Kimi Delta Attention), the others a latent vector per token."""

from __future__ import annotations

from collections.abc import Iterator

from headway.core.fields import Fields
from headway.shape.model import STATE_BYTES, KVGroup
from headway.shape.tensors import Dims, Tensor, latent_attention, latent_group

FULL_EVERY = 4


def _kinds(fields: Fields, size: Dims) -> list[str]:
    words = fields.words("layer_types", size.layers)
    if words is None:
        return ["latent" if layer and layer % FULL_EVERY == 0 else "state" for layer in range(size.layers)]
    return ["latent" if word == "full_attention" else "state" for word in words]


def sparse(fields: Fields, size: Dims) -> list[bool]:
    words = fields.words("mlp_layer_types", size.layers)
    if words is not None:
        return [word == "sparse" for word in words]
    dense = fields.size("first_k_dense_replace", default=1)
    return [layer >= dense for layer in range(size.layers)]


def tensors(fields: Fields, size: Dims) -> Iterator[Tensor]:
    """Every tensor, in the names of the published checkpoints."""
    d = size.d
    yield Tensor("model.embed_tokens.weight", (size.vocab, d), "embed")
    yield Tensor("model.norm.weight", (d,), "norm")
    if not size.tied:
        yield Tensor("lm_head.weight", (size.vocab, d), "head")
    for layer, (kind, routed) in enumerate(zip(_kinds(fields, size), sparse(fields, size), strict=True)):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield Tensor(f"{at}{name}.weight", (d,), "norm")
        make = latent_attention if kind == "latent" else _delta_attention
        yield from make(fields, size, at + "self_attn.")
        yield from (_experts if routed else _mlp)(fields, size, at + "block_sparse_moe.")


def _delta_attention(fields: Fields, size: Dims, at: str) -> Iterator[Tensor]:
    """Gated delta rule with a decay per channel; decay and output gate are of low rank."""
    heads, head = fields.size("linear_num_heads"), fields.size("linear_head_dim")
    width, kernel = heads * head, fields.size("linear_conv_kernel_dim")
    for name in ("q", "k", "v"):
        yield Tensor(f"{at}{name}_proj.weight", (width, size.d), "attention")
        yield Tensor(f"{at}{name}_conv1d.weight", (width, 1, kernel), "attention")
    for name in ("f", "g"):
        yield Tensor(f"{at}{name}_a_proj.weight", (head, size.d), "attention")
        yield Tensor(f"{at}{name}_b_proj.weight", (width, head), "attention")
    yield Tensor(at + "b_proj.weight", (heads, size.d), "attention")
    yield Tensor(at + "o_proj.weight", (size.d, width), "attention")
    yield Tensor(at + "A_log", (1, 1, heads, 1), "norm")
    yield Tensor(at + "dt_bias", (width,), "norm")
    yield Tensor(at + "o_norm.weight", (head,), "norm")


def _mlp(fields: Fields, size: Dims, at: str) -> Iterator[Tensor]:
    yield from _gated(at, size.d, size.ffn, "mlp")


def _gated(at: str, d: int, ffn: int, part: str) -> Iterator[Tensor]:
    for name in ("gate_proj", "up_proj"):
        yield Tensor(f"{at}{name}.weight", (ffn, d), part)
    yield Tensor(at + "down_proj.weight", (d, ffn), part)


def _experts(fields: Fields, size: Dims, at: str) -> Iterator[Tensor]:
    experts, ffn, d = fields.size("num_experts"), fields.size("moe_intermediate_size"), size.d
    yield Tensor(at + "gate.weight", (experts, d), "router")
    yield Tensor(at + "gate.e_score_correction_bias", (experts,), "router")
    for name, shape in (("w1", (ffn, d)), ("w2", (d, ffn)), ("w3", (ffn, d))):
        yield Tensor(f"{at}experts.{{}}.{name}.weight", shape, "experts", experts)
    if shared := fields.maybe("num_shared_experts"):
        yield from _gated(at + "shared_experts.", d, ffn * shared, "shared")


def groups(fields: Fields, size: Dims, kv_bytes: float) -> tuple[KVGroup, ...]:
    """A head x head matrix per linear head (decayed, read, updated: about 8 FLOPs per number), and the last inputs of
    its three convolutions; a latent vector in the other layers."""
    kinds = _kinds(fields, size)
    states = tuple(layer for layer, kind in enumerate(kinds) if kind == "state")
    latent = tuple(layer for layer, kind in enumerate(kinds) if kind == "latent")
    heads, head = fields.size("linear_num_heads"), fields.size("linear_head_dim")
    flops = 8.0 * heads * head * head
    return (
        *((KVGroup(
            "state", states, heads, head * head, 3 * head * (fields.size("linear_conv_kernel_dim") - 1),
            dtype_bytes=STATE_BYTES, decode_flops=flops, prefill_flops=flops,
        ),) if states else ()),
        *((latent_group(fields, size, latent, kv_bytes),) if latent else ()),
    )  # fmt: skip
