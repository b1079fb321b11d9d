"""The tensor inventory of a model, from its config alone: every name, shape and part, exact to the last norm.

Parameter counts, bytes per part and quantised layers all come from this list, so none of them can disagree.
Extra prediction layers (MTP) and encoders of multimodal models are not part of it: a plain decode does not read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from headway.core.fields import MAX_LAYERS, Fields
from headway.shape.families import Family


class Tensor(NamedTuple):
    """A weight of the checkpoint. With `copies` > 1 the name holds `{}` for the expert's number."""

    name: str
    shape: tuple[int, ...]
    part: str
    copies: int = 1

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


def inventory(family: Family, fields: Fields, kinds: list[str], sparse: list[bool]) -> Iterator[Tensor]:
    """All tensors. `kinds`: attention of each layer ("full", "window", "latent", "linear"); `sparse`: has experts."""
    for tensor in _inventory(family, fields, kinds, sparse):
        flipped = family.transposed and ".layers." in tensor.name
        shape = tensor.shape[::-1] if flipped else tensor.shape
        yield tensor._replace(name=family.named(tensor.name), shape=shape)


def _inventory(family: Family, fields: Fields, kinds: list[str], sparse: list[bool]) -> Iterator[Tensor]:
    """The same, named as a Llama's and with matrices (out, in)."""
    size = dims(fields)
    yield Tensor("model.embed_tokens.weight", (size.vocab, size.d), "embed")
    if family.positions:
        yield Tensor("model.embed_positions.weight", (fields.size("max_position_embeddings"), size.d), "gathered")
    if not size.tied:
        yield Tensor("lm_head.weight", (size.vocab, size.d), "head")
    if family.head_bias:
        yield Tensor("lm_head.bias", (size.vocab,), "head")
    yield from _norm("model.norm", size.d, family.norm_bias)
    shared = family.shared_norm and fields.flag("use_parallel_residual")
    for layer in range(size.layers):
        prefix = f"model.layers.{layer}."
        for norm in family.norms[: 1 if shared else None]:
            yield from _norm(prefix + norm, size.d, family.norm_bias)
        if kinds[layer] == "linear":
            yield from _linear_attention(family, fields, size, prefix + "linear_attn.")
        elif kinds[layer] == "latent":
            yield from _latent_attention(fields, size, prefix + "self_attn.")
        else:
            yield from _attention(family, fields, size, prefix + "self_attn.")
        if sparse[layer]:
            yield from _experts(family, fields, size, prefix)
        else:
            bias = fields.flag("mlp_bias")
            gates = "" if family.plain_mlp else "fused" if family.fused_gate_up else "gate"
            yield from _mlp(prefix + "mlp.", size.d, size.ffn, "mlp", gates, bias)


def _norm(name: str, width: int, bias: bool) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (width,), "norm")
    if bias:
        yield Tensor(f"{name}.bias", (width,), "norm")


def _linear(name: str, rows: int, columns: int, part: str, bias: bool = False) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (rows, columns), part)
    if bias:
        yield Tensor(f"{name}.bias", (rows,), part)


def _attention(family: Family, fields: Fields, size: Dims, at: str) -> Iterator[Tensor]:
    """Multi-head, grouped-query or multi-query attention."""
    stated = fields.flag("attention_bias")
    qkv_bias, o_bias = (stated if own is None else own for own in (family.qkv_bias, family.o_bias))
    q, kv = size.heads * size.head, size.kv_heads * size.head
    if family.fused_qkv:
        yield from _linear(at + "qkv_proj", q + 2 * kv, size.d, "attention", qkv_bias)
    else:
        yield from _linear(at + "q_proj", q * (2 if family.gated_attention else 1), size.d, "attention", qkv_bias)
        yield from _linear(at + "k_proj", kv, size.d, "attention", qkv_bias)
        yield from _linear(at + "v_proj", kv, size.d, "attention", qkv_bias)
    yield from _linear(at + "o_proj", size.d, q, "attention", o_bias)
    style = family.qk_norm
    if style and not fields.flag("use_qk_norm", style in ("head", "full")):
        style = ""
    for name, heads in (("q_norm", size.heads), ("k_norm", size.kv_heads)) if style else ():
        if style == "full":
            yield Tensor(f"{at}{name}.weight", (heads * size.head,), "norm")
        elif style == "each":
            yield Tensor(f"{at}{name}.weight", (heads, size.head), "norm")
        elif style == "apart":
            yield from (Tensor(f"{at}{name}.norms.{head}.weight", (size.head,), "norm") for head in range(heads))
        else:
            yield from _norm(at + name, size.head, family.norm_bias)
    if family.sinks:
        yield Tensor(at + "sinks", (size.heads,), "norm")


def _latent_attention(fields: Fields, size: Dims, at: str) -> Iterator[Tensor]:
    """Multi-head latent attention (DeepSeek-V2): low-rank queries, one latent vector and one rotary key cached."""
    bias = fields.flag("attention_bias")
    rank, rope = fields.size("kv_lora_rank"), fields.size("qk_rope_head_dim")
    nope, value = fields.size("qk_nope_head_dim"), fields.size("v_head_dim")
    q_rank = fields.maybe("q_lora_rank")
    if q_rank is None:
        yield from _linear(at + "q_proj", size.heads * (nope + rope), size.d, "attention")
    else:
        yield from _linear(at + "q_a_proj", q_rank, size.d, "attention", bias)
        yield Tensor(at + "q_a_layernorm.weight", (q_rank,), "norm")
        yield from _linear(at + "q_b_proj", size.heads * (nope + rope), q_rank, "attention")
    yield from _linear(at + "kv_a_proj_with_mqa", rank + rope, size.d, "attention", bias)
    yield Tensor(at + "kv_a_layernorm.weight", (rank,), "norm")
    yield from _linear(at + "kv_b_proj", size.heads * (nope + value), rank, "attention")
    yield from _linear(at + "o_proj", size.d, size.heads * value, "attention", bias)
    if fields.maybe("index_topk"):  # sparse attention's indexer (DeepSeek-V3.2, GLM-5)
        heads, width = fields.size("index_n_heads"), fields.size("index_head_dim")
        yield from _linear(at + "indexer.wq_b", heads * width, q_rank or size.d, "attention")
        yield from _linear(at + "indexer.wk", width, size.d, "attention")
        yield from _linear(at + "indexer.weights_proj", heads, size.d, "attention")
        yield Tensor(at + "indexer.k_norm.weight", (width,), "norm")
        yield Tensor(at + "indexer.k_norm.bias", (width,), "norm")


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
        yield from _linear(f"{at}in_proj_{part}", rows, size.d, "attention")
    yield Tensor(at + "conv1d.weight", (2 * keys + values, 1, fields.size("linear_conv_kernel_dim")), "attention")
    yield Tensor(at + "A_log", (value_heads,), "norm")
    yield Tensor(at + "dt_bias", (value_heads,), "norm")
    yield Tensor(at + "norm.weight", (value_head,), "norm")
    yield from _linear(at + "out_proj", size.d, values, "attention")


def _mlp(at: str, d: int, ffn: int, part: str, gates: str = "gate", bias: bool = False) -> Iterator[Tensor]:
    """gates: "gate" a matrix of their own, "fused" one with what they gate, "" none."""
    if gates == "fused":
        yield from _linear(at + "gate_up_proj", 2 * ffn, d, part, bias)
    else:
        if gates:
            yield from _linear(at + "gate_proj", ffn, d, part, bias)
        yield from _linear(at + "up_proj", ffn, d, part, bias)
    yield from _linear(at + "down_proj", d, ffn, part, bias)


def expert_count(fields: Fields) -> int:
    return fields.size("num_experts", "num_local_experts", "n_routed_experts")


def _experts(family: Family, fields: Fields, size: Dims, layer: str) -> Iterator[Tensor]:
    """Router, routed experts and shared experts of one layer."""
    experts, d = expert_count(fields), size.d
    ffn = fields.size("moe_intermediate_size", "intermediate_size")
    at = layer + ("block_sparse_moe." if family.experts == "block" else "mlp.")
    if family.experts == "stacked":
        yield from _linear(at + "router", experts, d, "router", bias=True)
        yield Tensor(at + "experts.gate_up_proj", (experts, d, 2 * ffn), "experts")
        yield Tensor(at + "experts.gate_up_proj_bias", (experts, 2 * ffn), "experts")
        yield Tensor(at + "experts.down_proj", (experts, ffn, d), "experts")
        yield Tensor(at + "experts.down_proj_bias", (experts, d), "experts")
        return
    yield Tensor(at + "gate.weight", (experts, d), "router")
    if family.router_bias:
        bias = "e_score_correction_bias" if family.experts == "block" else "gate.e_score_correction_bias"
        yield Tensor(at + bias, (experts,), "router")
    names = {"w1": (ffn, d), "w2": (d, ffn), "w3": (ffn, d)}
    if family.experts == "mlp":
        names = {"gate_proj": (ffn, d), "up_proj": (ffn, d), "down_proj": (d, ffn)}
    for name, shape in names.items():
        yield Tensor(f"{at}experts.{{}}.{name}.weight", shape, "experts", experts)
    if family.shared == "sum" and (shared := fields.maybe("n_shared_experts")):
        yield from _mlp(at + "shared_experts.", d, ffn * shared, "shared", bias=fields.flag("mlp_bias"))
    elif family.shared == "gated" and (width := fields.maybe("shared_expert_intermediate_size")):
        yield from _mlp(at + "shared_expert.", d, width, "shared")
        yield Tensor(at + "shared_expert_gate.weight", (1, d), "shared")
