"""`ModelShape` from a Hugging Face `config.json`: no weights, no network.

The config is turned into a tensor inventory (`tensors.py`), which gives parameters and stored bytes by part, and into
KV groups, one per kind of attention its layers use. GGUF headers are read by `gguf.py`.
"""

from __future__ import annotations

import re
from typing import Any

from headway.core.errors import shown
from headway.core.fields import Fields
from headway.shape.families import Family, open_config
from headway.shape.formats import FORMATS, known_format
from headway.shape.model import STATE_BYTES, ByPart, KVGroup, ModelShape, MoE
from headway.shape.own import OWN
from headway.shape.quantised import stored
from headway.shape.tensors import Dims, Tensor, dims, expert_count, inventory, latent_group


def shape_from_config(raw: Any, name: str = "") -> ModelShape:
    """The shape of the language model described by the parsed `config.json` in `raw`.

    Raises:
        BadInput: not a language model, or a field is missing or impossible; names the field.
    """
    model_type, family, fields = open_config(raw)
    fields = fields.watched()
    size = dims(fields)
    tensors, sparse = _tensors(family, fields, size)
    dtype = known_format(str(fields.values.get("dtype") or fields.values.get("torch_dtype"))) or FORMATS["bf16"]
    quantised = fields.values.get("quantization_config") or fields.values.get("compression_config") or {}
    if quantised and fields.has("expert_dtype"):
        quantised = {"expert_dtype": fields.values["expert_dtype"]} | quantised
    quantisation = stored(quantised, dtype)
    cache = quantisation.kv or 2.0
    if family.own:
        groups = OWN[family.own].groups(fields, size, cache)
    else:
        groups = kv_groups(fields, size, layer_kinds(family, fields, size), cache)
    latent = fields.maybe("kv_lora_rank") is not None
    moe = _moe(fields, tensors, sum(sparse))
    context = fields.maybe("max_position_embeddings") or 0
    return ModelShape(
        name=name or model_type, family=model_type, layers=size.layers, d_model=size.d, vocab=size.vocab,
        heads=size.heads, kv_heads=1 if any(group.kind == "latent" for group in groups) else size.kv_heads,
        head_width=fields.size("qk_nope_head_dim") + fields.size("qk_rope_head_dim") if latent else size.head,
        params=_by_part(tensors, lambda tensor: 1), stored=_by_part(tensors, quantisation.size),
        groups=groups, tied=size.tied, moe=moe, context=context,
        weight_format=quantisation.format, unread=unread_fields(family, fields),
    )  # fmt: skip


# Fields of sizes and counts that say nothing of the shape of a decoder's matrices and caches.
_SHAPELESS = frozenset((
    "initializer_range", "layer_norm_eps", "rms_norm_eps", "layer_norm_epsilon", "num_nextn_predict_layers",
    "num_mtp_modules", "chunk_size", "chunk_size_feed_forward", "layerdrop", "block_size", "max_window_layers",
    "partial_rotary_factor", "rotary_dim", "moe_layer_freq", "first_k_dense_replace", "moe_renormalize",
    "query_pre_attn_scalar", "vocab_size_per_layer_input", "vision_config", "audio_config",
    "_sliding_window_pattern", "qk_head_dim", "moe_shared_expert_overlap",
))  # fmt: skip
_PATTERNS = ("sliding_window_pattern", "full_attention_interval")
_SIZES = re.compile(r"layer|expert|head|size|rank|dim|width|window|conv|state|kv|moe|latent|compress|stream")
_HABITS = re.compile(
    r"rope|router|aux|loss|drop|init|mtp|nextn|predict|token_id|hidden_states|use_cache|act|group|eps|norm|precision|"
    r"dtype|factor|scal|softcap|float32|fp32|time_step|index"
)


def unread_fields(family: Family, fields: Fields) -> tuple[str, ...]:
    """Fields that sound as if they decide a shape and that nothing asked for."""
    seen: set[str] = getattr(fields.values, "seen", set())
    known = _SHAPELESS | seen | set(family.defaults) | set(family.unread) | {theirs for _, theirs in family.fields}
    return tuple(
        name for name, value in fields.values.items()
        if value not in (None, False, 0, [], {}) and name not in known
        and _SIZES.search(name) and not _HABITS.search(name)
    )  # fmt: skip


def tensors_of(raw: Any) -> list[Tensor]:
    """The tensor inventory of a `config.json`: every name, shape and part."""
    _, family, fields = open_config(raw)
    return _tensors(family, fields, dims(fields))[0]


def _tensors(family: Family, fields: Fields, size: Dims) -> tuple[list[Tensor], list[bool]]:
    """(inventory, which layers have routed experts)."""
    if family.own:
        own = OWN[family.own]
        return list(own.tensors(fields, size)), own.sparse(fields, size)
    sparse = sparse_layers(family, fields, size.layers)
    return list(inventory(family, fields, layer_kinds(family, fields, size), sparse)), sparse


def layer_kinds(family: Family, fields: Fields, size: Dims) -> list[str]:
    """Attention of each layer: "full", "window", "latent" or "linear"."""
    listed = fields.words("layer_types", size.layers)
    if fields.maybe("kv_lora_rank"):
        return ["latent"] * size.layers
    windowed = fields.maybe("sliding_window") is not None and fields.flag("use_sliding_window", True)
    hybrid = family.gated_attention  # Qwen3-Next and 3.5: linear attention where others have a window
    words = {
        "full_attention": "full", "attention": "full", "global": "full", "linear_attention": "linear",
        "sliding_attention": "window" if windowed else "full",
    }  # fmt: skip
    if listed is not None:
        for rule in _PATTERNS:
            fields.has(rule)  # which the list spells out
        unknown = sorted(set(listed) - words.keys())
        if unknown:
            raise fields.fault("layer_types", f"{unknown[0]!r}; accepted: {', '.join(words)}")
        return [words[word] for word in listed]
    if family.window_every and (windowed or hybrid):
        every = fields.size(*_PATTERNS, default=family.window_every)
        other = "linear" if hybrid else "window"
        return ["full" if (layer + 1) % every == 0 else other for layer in range(size.layers)]
    if not windowed:
        return ["full"] * size.layers
    first = fields.values.get("max_window_layers") or 0  # Qwen2: the layers from there on have the window
    return ["window" if layer >= first else "full" for layer in range(size.layers)]


def sparse_layers(family: Family, fields: Fields, layers: int) -> list[bool]:
    """Which layers have routed experts."""
    if not family.experts:
        return [False] * layers
    listed = fields.words("mlp_layer_types", layers)
    if listed is not None:
        return [word == "sparse" for word in listed]
    dense_prefix = fields.maybe("first_k_dense_replace") or 0
    step = fields.size("decoder_sparse_step", default=1)
    dense = fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise fields.fault("mlp_only_layers", f"{shown(dense)} is not a list of layers")
    return [i >= dense_prefix and (i + 1) % step == 0 and i not in dense for i in range(layers)]


def kv_groups(fields: Fields, size: Dims, kinds: list[str], kv_bytes: float) -> tuple[KVGroup, ...]:
    """One group per kind of attention, in order of their first layer (B1; FLOPs per pair: B2's 4*d_attn)."""
    groups: list[KVGroup] = []
    for kind in dict.fromkeys(kinds):
        layers = tuple(layer for layer, this in enumerate(kinds) if this == kind)
        if kind == "linear":
            groups.append(_state_group(fields, layers))
        elif kind == "latent":
            groups.extend(_latent_groups(fields, size, layers, kv_bytes))
        else:
            flops = 4.0 * size.heads * size.head
            groups.append(KVGroup(
                kind, layers, size.kv_heads, size.head, size.head, dtype_bytes=kv_bytes,
                window=fields.size("sliding_window") if kind == "window" else None,
                decode_flops=flops, prefill_flops=flops,
            ))  # fmt: skip
    return tuple(groups)


def _latent_groups(fields: Fields, size: Dims, layers: tuple[int, ...], kv_bytes: float) -> list[KVGroup]:
    """A sparse indexer caches one more key per token and reads them all."""
    latent, top = latent_group(fields, size, layers, kv_bytes), fields.maybe("index_topk")
    if top is None:
        return [latent]
    width, heads = fields.size("index_head_dim"), fields.size("index_n_heads")
    flops = 2.0 * heads * width
    return [
        latent,
        KVGroup("latent", layers, 1, width, 0, dtype_bytes=1.0, decode_flops=flops, prefill_flops=flops),
    ]


def _state_group(fields: Fields, layers: tuple[int, ...]) -> KVGroup:
    """Gated DeltaNet: a d_k x d_v matrix per value head, and the last inputs of its short convolution; both split by
    key head. Per token it decays, reads and rank-one updates the matrix: about 8 FLOPs per number."""
    key_heads, value_heads = fields.size("linear_num_key_heads"), fields.size("linear_num_value_heads")
    key, value = fields.size("linear_key_head_dim"), fields.size("linear_value_head_dim")
    share = value_heads // key_heads
    matrix = share * key * value
    convolution = (fields.size("linear_conv_kernel_dim") - 1) * (2 * key + share * value)
    flops = 8.0 * value_heads * key * value
    return KVGroup(
        "state", layers, key_heads, matrix, convolution, dtype_bytes=STATE_BYTES,
        decode_flops=flops, prefill_flops=flops,
    )  # fmt: skip


def _by_part(tensors: list[Tensor], size: Any) -> ByPart:
    sums: dict[str, float] = {}
    for tensor in tensors:
        sums[tensor.part] = sums.get(tensor.part, 0) + tensor.numel * size(tensor)
    return ByPart(**sums)


def _moe(fields: Fields, tensors: list[Tensor], layers: int) -> MoE | None:
    if not layers:
        return None
    experts = expert_count(fields)
    active = fields.size("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts")
    if active > experts:
        raise fields.fault("num_experts_per_tok", f"{active} of {experts} experts; accepted: 1 to {experts}")
    total = sum(tensor.numel for tensor in tensors if tensor.part == "experts")
    return MoE(layers=layers, experts=experts, active=active, expert_params=total // (layers * experts))
