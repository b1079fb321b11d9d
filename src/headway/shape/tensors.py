"""The tensor inventory of a model, from its config alone: every name, shape and part, exact to the last norm.

Parameter counts, bytes per part, quantised layers, and what an engine takes from a file all come from this list, so
none of them can disagree.
Extra prediction layers (MTP) and encoders of multimodal models are not part of it: a plain decode does not read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from headway.core.fields import MAX_LAYERS, Fields
from headway.shape.family import Family
from headway.shape.model import KVGroup


class Tensor(NamedTuple):
    """A weight of the checkpoint.

    Attributes:
        name: in a Hugging Face folder; with `copies` > 1 it holds `{}` for the number of the expert, or head.
        shape: of one copy.
        part: it plays in a step, a field of `ByPart`.
        role: what forward passes know it as, "3.q" of layer 3; "" where none does.
    """

    name: str
    shape: tuple[int, ...]
    part: str
    copies: int = 1
    role: str = ""

    @property
    def numel(self) -> int:
        return prod(self.shape) * self.copies


class Dims(NamedTuple):
    """Widths of a config under one set of names."""

    layers: int
    d: int
    ffn: int
    vocab: int
    heads: int
    kv_heads: int
    head: int
    tied: bool


def dims(fields: Fields) -> Dims:
    layers = fields.size("num_hidden_layers", most=MAX_LAYERS)
    d = fields.size("hidden_size")
    heads = fields.size("num_attention_heads")
    return Dims(
        layers=layers, d=d, heads=heads,
        ffn=fields.size("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
        vocab=fields.size("vocab_size"),
        kv_heads=fields.size("num_key_value_heads", default=heads),
        head=fields.size("head_dim", default=max(1, d // heads)),
        tied=fields.flag("tie_word_embeddings"),
    )  # fmt: skip


# What forward passes know a tensor as -> its name in a GGUF, where ".weight" or ".bias" follows.
_IN_GGUF = {
    "embed": "token_embd", "positions": "position_embd", "norm": "output_norm", "head": "output",
    "attention_norm": "attn_norm", "attention_post_norm": "post_attention_norm", "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "qkv": "attn_qkv",
    "o": "attn_output", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "sinks": "attn_sinks", "q_a": "attn_q_a",
    "q_a_norm": "attn_q_a_norm", "q_b": "attn_q_b", "kv_a": "attn_kv_a_mqa", "kv_norm": "attn_kv_a_norm",
    "kv_b": "attn_kv_b", "key_up": "attn_k_b", "value_up": "attn_v_b", "gate": "ffn_gate", "up": "ffn_up",
    "down": "ffn_down", "gate_up": "ffn_up", "router": "ffn_gate_inp", "correction": "exp_probs_b",
    "experts_gate": "ffn_gate_exps", "experts_up": "ffn_up_exps", "experts_down": "ffn_down_exps",
    "shared_gate": "ffn_gate_shexp", "shared_up": "ffn_up_shexp", "shared_down": "ffn_down_shexp",
    "shared_switch": "ffn_gate_inp_shexp",
}  # fmt: skip


def name_in_gguf(role: str, family: Family) -> str:
    """A GGUF's name of the tensor with this role."""
    layer, dot, own = role.rpartition(".")
    stem = own.removesuffix("_bias")
    name = f"{family.in_gguf.get(stem) or _IN_GGUF[stem]}.{'weight' if stem == own else 'bias'}"
    return f"blk.{layer}.{name}" if dot else name


def inventory(family: Family, fields: Fields, kinds: list[str], sparse: list[bool]) -> Iterator[Tensor]:
    """All tensors. `kinds`: attention of each layer ("full", "window", "latent", "linear"); `sparse`: has experts."""
    size = dims(fields)
    for tensor in _beside_layers(family, fields, size):
        yield tensor._replace(name=family.named(tensor.name))
    for layer in range(size.layers):
        for tensor in _layer(family, fields, size, kinds[layer], sparse[layer]):
            yield tensor._replace(
                name=family.named(f"model.layers.{layer}.{tensor.name}"),
                shape=tensor.shape[::-1] if family.transposed else tensor.shape,
                role=tensor.role and f"{layer}.{tensor.role}",
            )


def _beside_layers(family: Family, fields: Fields, size: Dims) -> Iterator[Tensor]:
    """Named as a Llama's."""
    yield from _linear("embed", "model.embed_tokens", size.vocab, size.d, "embed")
    if family.positions:
        positions = fields.size("max_position_embeddings")
        yield from _linear("positions", "model.embed_positions", positions, size.d, "gathered")
    if not size.tied:
        yield from _linear("head", "lm_head", size.vocab, size.d, "head")
    if family.head_bias:
        yield Tensor("lm_head.bias", (size.vocab,), "head", role="head_bias")
    yield from _norm("norm", "model.norm", size.d, family.norm_bias)


def _layer(family: Family, fields: Fields, size: Dims, kind: str, sparse: bool) -> Iterator[Tensor]:
    """Named as in a Llama's layer, matrices (out, in)."""
    shared = family.shared_norm and fields.flag("use_parallel_residual")
    for role, norm in family.norms[: 1 if shared else None]:
        yield from _norm(role, norm, size.d, family.norm_bias)
    if kind == "linear":
        yield from _linear_attention(family, fields, size, "linear_attn.")
    elif kind == "latent":
        yield from latent_attention(fields, size, "self_attn.", family.apart)
    else:
        yield from _attention(family, fields, size, "self_attn.")
    if sparse:
        yield from _experts(family, fields, size)
    else:
        gates = "" if family.plain_mlp else "fused" if family.fused_gate_up else "gate"
        yield from _mlp("", "mlp.", size.d, size.ffn, "mlp", gates, fields.flag("mlp_bias"))


def _norm(role: str, name: str, width: int, bias: bool = False) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (width,), "norm", role=role)
    if bias:
        yield Tensor(f"{name}.bias", (width,), "norm", role=f"{role}_bias")


def _linear(
    role: str, name: str, rows: int, columns: int, part: str, bias: bool = False, copies: int = 1
) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (rows, columns), part, copies, role)
    if bias:
        yield Tensor(f"{name}.bias", (rows,), part, copies, f"{role}_bias")


def _attention(family: Family, fields: Fields, size: Dims, at: str) -> Iterator[Tensor]:
    """Multi-head, grouped-query or multi-query attention."""
    stated = fields.flag("attention_bias")
    qkv_bias, o_bias = (stated if own is None else own for own in (family.qkv_bias, family.o_bias))
    q, kv = size.heads * size.head, size.kv_heads * size.head
    if family.fused_qkv:
        yield from _linear("qkv", at + "qkv_proj", q + 2 * kv, size.d, "attention", qkv_bias)
    else:
        gated = 2 if family.gated_attention else 1
        for role, rows in (("q", q * gated), ("k", kv), ("v", kv)):
            yield from _linear(role, f"{at}{role}_proj", rows, size.d, "attention", qkv_bias)
    yield from _linear("o", at + "o_proj", size.d, q, "attention", o_bias)
    normed = family.qk_norm if family.qk_norm and fields.flag("use_qk_norm", True) else ""
    for role, heads in (("q_norm", size.heads), ("k_norm", size.kv_heads)) if normed else ():
        if normed == "full":
            yield from _norm(role, at + role, heads * size.head)
        elif normed == "each":
            yield Tensor(f"{at}{role}.weight", (heads, size.head), "norm", role=role)
        elif normed == "apart":
            yield Tensor(f"{at}{role}.norms.{{}}.weight", (size.head,), "norm", heads, role)
        else:
            yield from _norm(role, at + role, size.head, family.norm_bias)
    if family.sinks:
        yield Tensor(at + "sinks", (size.heads,), "norm", role="sinks")


def latent_attention(fields: Fields, size: Dims, at: str, apart: bool = False) -> Iterator[Tensor]:
    """Multi-head latent attention (DeepSeek-V2): low-rank queries, one latent vector and one rotary key cached.
    apart: matrices of every head's keys and values instead of one for all."""
    bias = fields.flag("attention_bias")
    rank, rope = fields.size("kv_lora_rank"), fields.size("qk_rope_head_dim")
    nope, value = fields.size("qk_nope_head_dim"), fields.size("v_head_dim")
    q_rank = fields.maybe("q_lora_rank")
    if q_rank is None:
        yield from _linear("q", at + "q_proj", size.heads * (nope + rope), size.d, "attention")
    else:
        yield from _linear("q_a", at + "q_a_proj", q_rank, size.d, "attention", bias)
        yield from _norm("q_a_norm", at + "q_a_layernorm", q_rank)
        yield from _linear("q_b", at + "q_b_proj", size.heads * (nope + rope), q_rank, "attention")
    yield from _linear("kv_a", at + "kv_a_proj_with_mqa", rank + rope, size.d, "attention", bias)
    yield from _norm("kv_norm", at + "kv_a_layernorm", rank)
    if apart:
        yield Tensor(at + "k_b_proj.{}.weight", (rank, nope), "attention", size.heads, "key_up")
        yield Tensor(at + "v_b_proj.{}.weight", (value, rank), "attention", size.heads, "value_up")
    else:
        yield from _linear("kv_b", at + "kv_b_proj", size.heads * (nope + value), rank, "attention")
    yield from _linear("o", at + "o_proj", size.d, size.heads * value, "attention", bias)
    if fields.maybe("index_topk"):  # sparse attention's indexer (DeepSeek-V3.2, GLM-5)
        heads, width = fields.size("index_n_heads"), fields.size("index_head_dim")
        yield Tensor(at + "indexer.wq_b.weight", (heads * width, q_rank or size.d), "attention")
        yield Tensor(at + "indexer.wk.weight", (width, size.d), "attention")
        yield Tensor(at + "indexer.weights_proj.weight", (heads, size.d), "attention")
        yield Tensor(at + "indexer.k_norm.weight", (width,), "norm")
        yield Tensor(at + "indexer.k_norm.bias", (width,), "norm")


def latent_group(fields: Fields, size: Dims, layers: tuple[int, ...], kv_bytes: float) -> KVGroup:
    """MLA caches d_c + d_r numbers per token. Decode works on the latent vectors (scores over d_c + d_r, values d_c);
    prefill expands keys and values to all heads."""
    rank, rope = fields.size("kv_lora_rank"), fields.size("qk_rope_head_dim")
    nope, value = fields.size("qk_nope_head_dim"), fields.size("v_head_dim")
    return KVGroup(
        "latent", layers, 1, rope, rank, dtype_bytes=kv_bytes, read_limit=fields.maybe("index_topk"),
        decode_flops=2.0 * size.heads * (2 * rank + rope), prefill_flops=2.0 * size.heads * (nope + rope + value),
    )  # fmt: skip


def _linear_attention(family: Family, fields: Fields, size: Dims, at: str) -> Iterator[Tensor]:
    """Gated DeltaNet (Qwen3-Next, Qwen3.5): a recurrent state instead of a cache."""
    keys = fields.size("linear_num_key_heads") * fields.size("linear_key_head_dim")
    value_heads, value_head = fields.size("linear_num_value_heads"), fields.size("linear_value_head_dim")
    values = value_heads * value_head
    if family.split_linear:
        parts = {"qkv": 2 * keys + values, "z": values, "a": value_heads, "b": value_heads}
    else:
        parts = {"qkvz": 2 * (keys + values), "ba": 2 * value_heads}
    for part, rows in parts.items():
        yield Tensor(f"{at}in_proj_{part}.weight", (rows, size.d), "attention")
    yield Tensor(at + "conv1d.weight", (2 * keys + values, 1, fields.size("linear_conv_kernel_dim")), "attention")
    yield Tensor(at + "A_log", (value_heads,), "norm")
    yield Tensor(at + "dt_bias", (value_heads,), "norm")
    yield Tensor(at + "norm.weight", (value_head,), "norm")
    yield Tensor(at + "out_proj.weight", (size.d, values), "attention")


def _mlp(
    of: str, at: str, d: int, ffn: int, part: str, gates: str = "gate", bias: bool = False, copies: int = 1
) -> Iterator[Tensor]:
    """of: what roles start with. gates: "gate" a matrix of their own, "fused" one with what they gate, "" none."""
    if gates == "fused":
        yield from _linear(of + "gate_up", at + "gate_up_proj", 2 * ffn, d, part, bias, copies)
    else:
        if gates:
            yield from _linear(of + "gate", at + "gate_proj", ffn, d, part, bias, copies)
        yield from _linear(of + "up", at + "up_proj", ffn, d, part, bias, copies)
    yield from _linear(of + "down", at + "down_proj", d, ffn, part, bias, copies)


def expert_count(fields: Fields) -> int:
    return fields.size("num_experts", "num_local_experts", "n_routed_experts")


def _experts(family: Family, fields: Fields, size: Dims) -> Iterator[Tensor]:
    """Router, routed experts and shared experts of one layer."""
    experts, d = expert_count(fields), size.d
    ffn = fields.size("moe_intermediate_size", "intermediate_size")
    at = "mlp." if family.experts in ("mlp", "stacked") else "block_sparse_moe."
    if family.experts == "stacked":
        yield from _linear("router", at + "router", experts, d, "router", bias=True)
        yield Tensor(at + "experts.gate_up_proj", (experts, d, 2 * ffn), "experts")
        yield Tensor(at + "experts.gate_up_proj_bias", (experts, 2 * ffn), "experts")
        yield Tensor(at + "experts.down_proj", (experts, ffn, d), "experts")
        yield Tensor(at + "experts.down_proj_bias", (experts, d), "experts")
        return
    if family.experts == "fused":
        yield from _linear("router", at + "router.layer", experts, d, "router")
        yield Tensor(at + "input_linear.weight", (experts, 2 * ffn, d), "experts")
        yield Tensor(at + "output_linear.weight", (experts, d, ffn), "experts")
        return
    yield from _linear("router", at + "gate", experts, d, "router", family.expert_bias)
    if family.correction:
        bias = "e_score_correction_bias" if family.experts == "block" else "gate.e_score_correction_bias"
        yield Tensor(at + bias, (experts,), "router", role="correction_bias")
    if family.experts == "block":
        for name, shape in (("w1", (ffn, d)), ("w2", (d, ffn)), ("w3", (ffn, d))):
            yield Tensor(f"{at}experts.{{}}.{name}.weight", shape, "experts", experts)
    else:
        yield from _mlp("experts_", at + "experts.{}.", d, ffn, "experts", bias=family.expert_bias, copies=experts)
    if family.shared == "sum" and (shared := fields.maybe("n_shared_experts")):
        biased = fields.flag("mlp_bias")
        yield from _mlp("shared_", at + "shared_experts.", d, ffn * shared, "shared", bias=biased)
    elif family.shared == "gated" and (width := fields.maybe("shared_expert_intermediate_size")):
        yield from _mlp("shared_", at + "shared_expert.", d, width, "shared")
        yield from _linear("shared_switch", at + "shared_expert_gate", 1, d, "shared")
