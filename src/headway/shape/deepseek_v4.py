"""DeepSeek V4: a window of one shared key/value vector per token in every layer, and what is older as compressed rows.

Heavily compressed layers keep a row per 128 tokens and read them all; sparse ones a row per 4, of which an indexer
picks `index_topk`. The residual has `hc_mult` streams, mixed before and after each half of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway.core.fields import Fields
from headway.shape.model import KVGroup
from headway.shape.tensors import Dims, Tensor

SPARSE, HEAVY, WINDOW = "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"
RATES = {SPARSE: 4, HEAVY: 128}
HASHED = 3  # first layers, where a token's id picks its experts: their routers have no correction


def _kinds(fields: Fields, size: Dims) -> list[str]:
    words = fields.words("layer_types", size.layers)
    if words is None:
        return [HEAVY if layer < 2 or layer % 2 == 0 else SPARSE for layer in range(size.layers)]
    if unknown := sorted(set(words) - {SPARSE, HEAVY, WINDOW}):
        raise fields.fault("layer_types", f"{unknown[0]!r}; accepted: {SPARSE}, {HEAVY}, {WINDOW}")
    return words


def sparse(fields: Fields, size: Dims) -> list[bool]:
    return [True] * size.layers


def tensors(fields: Fields, size: Dims) -> Iterator[Tensor]:
    """Every parameter, in the names of the published checkpoints (the table of hashed tokens is none)."""
    d, streams = size.d, fields.size("hc_mult")
    yield Tensor("model.embed_tokens.weight", (size.vocab, d), "embed")
    yield Tensor("model.norm.weight", (d,), "norm")
    if not size.tied:
        yield Tensor("head.weight", (size.vocab, d), "head")
    yield from _mixing("model.hc_head.hc_", streams, streams, 1, d)
    words = fields.words("mlp_layer_types", size.layers)
    hashed = fields.values.get("num_hash_layers", HASHED)
    for layer, kind in enumerate(_kinds(fields, size)):
        at = f"model.layers.{layer}."
        for half in ("attn", "ffn"):
            yield Tensor(f"{at}{half}_norm.weight", (d,), "norm")
            yield from _mixing(f"{at}hc_{half}_", streams, (2 + streams) * streams, 3, d)
        yield from _attention(fields, size, at + "attn.", kind)
        by_id = words[layer] == "hash_moe" if words else layer < hashed
        yield from _experts(fields, size, at + "ffn.", not by_id)


def _mixing(at: str, streams: int, rows: int, scales: int, d: int) -> Iterator[Tensor]:
    yield Tensor(at + "base", (rows,), "norm")
    yield Tensor(at + "fn", (rows, streams * d), "norm")  # float32, never quantised
    yield Tensor(at + "scale", (scales,), "norm")


def _attention(fields: Fields, size: Dims, at: str, kind: str) -> Iterator[Tensor]:
    d, head, rank = size.d, size.head, fields.size("q_lora_rank")
    parts, out = fields.size("o_groups"), fields.size("o_lora_rank")
    for name, shape in (
        ("wq_a", (rank, d)), ("wq_b", (size.heads * head, rank)), ("wkv", (head, d)),
        ("wo_a", (parts * out, size.heads * head // parts)), ("wo_b", (d, parts * out)),
    ):  # fmt: skip
        yield Tensor(f"{at}{name}.weight", shape, "attention")
    yield Tensor(at + "q_norm.weight", (rank,), "norm")
    yield Tensor(at + "norm.weight", (head,), "norm")
    yield Tensor(at + "attn_sink", (size.heads,), "norm")
    if kind == HEAVY:
        yield from _compressor(at + "compressor.", d, head, _rate(fields, HEAVY), 1)
    elif kind == SPARSE:
        heads, width, rate = fields.size("index_n_heads"), fields.size("index_head_dim"), _rate(fields, SPARSE)
        yield from _compressor(at + "compressor.", d, head, rate, 2)
        yield from _compressor(at + "indexer.compressor.", d, width, rate, 2)
        yield Tensor(at + "indexer.weights_proj.weight", (heads, d), "attention")
        yield Tensor(at + "indexer.wq_b.weight", (heads * width, rank), "attention")


def _rate(fields: Fields, kind: str) -> int:
    """Tokens of a compressed row."""
    return fields.group("compress_rates").size(kind, default=RATES[kind])


def _compressor(at: str, d: int, width: int, rate: int, series: int) -> Iterator[Tensor]:
    yield Tensor(at + "ape", (rate, series * width), "norm")
    yield Tensor(at + "norm.weight", (width,), "norm")
    for name in ("wgate", "wkv"):
        yield Tensor(f"{at}{name}.weight", (series * width, d), "attention")


def _experts(fields: Fields, size: Dims, at: str, corrected: bool) -> Iterator[Tensor]:
    experts, ffn, d = fields.size("n_routed_experts"), fields.size("moe_intermediate_size"), size.d
    yield Tensor(at + "gate.weight", (experts, d), "router")
    if corrected:
        yield Tensor(at + "gate.bias", (experts,), "router")
    shared = ffn * fields.size("n_shared_experts")
    for name in ("w1", "w2", "w3"):
        down = name == "w2"
        yield Tensor(f"{at}experts.{{}}.{name}.weight", (d, ffn) if down else (ffn, d), "experts", experts)
        yield Tensor(f"{at}shared_experts.{name}.weight", (d, shared) if down else (shared, d), "shared")


def groups(fields: Fields, size: Dims, kv_bytes: float) -> tuple[KVGroup, ...]:
    """One vector is key and value of all heads, so none is split: the window's, the compressed rows, and the
    indexer's keys, which it reads all."""
    kinds, head = _kinds(fields, size), size.head
    flops = 4.0 * size.heads * head
    found = [KVGroup(
        "latent", tuple(range(size.layers)), 1, 0, head, window=fields.size("sliding_window"), dtype_bytes=kv_bytes,
        decode_flops=flops, prefill_flops=flops,
    )]  # fmt: skip
    for kind in (SPARSE, HEAVY):
        layers = tuple(layer for layer, this in enumerate(kinds) if this == kind)
        if not layers:
            continue
        rate = _rate(fields, kind)
        found.append(KVGroup(
            "latent", layers, 1, 0, head, dtype_bytes=kv_bytes, stride=rate, decode_flops=flops / rate,
            read_limit=fields.size("index_topk") * rate if kind == SPARSE else None, prefill_flops=flops / rate,
        ))  # fmt: skip
        if kind == SPARSE:
            heads, width = fields.size("index_n_heads"), fields.size("index_head_dim")
            pair = 2.0 * heads * width / rate
            found.append(KVGroup(
                "latent", layers, 1, width, 0, dtype_bytes=1.0, stride=rate, decode_flops=pair, prefill_flops=pair,
            ))  # fmt: skip
    return tuple(found)
