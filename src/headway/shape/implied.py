"""Fields that follow from a config's others, under the names that its family's shape is read by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.core.fields import MAX_LAYERS

Values = Mapping[str, Any]
HEADS = "num_attention_heads"


def falcon(values: Values) -> Values:
    """The generations of Falcon: one key/value head for all, some, or one for each query head."""
    grouped, stated, heads = (values.get(name) for name in ("new_decoder_architecture", "num_kv_heads", HEADS))
    kv_heads = (stated or heads) if grouped else 1 if values.get("multi_query") else heads
    return {"num_key_value_heads": kv_heads, "use_parallel_residual": bool(grouped or values.get("parallel_attn"))}


def gemma3n(values: Values) -> Values:
    """`intermediate_size` may be listed by layer: one width for whoever asks for one."""
    widths = values.get("intermediate_size")
    if not isinstance(widths, list) or not widths or not all(isinstance(width, int) for width in widths):
        return {}
    return {"intermediate_size": max(widths), "intermediate_sizes": widths}


def nemotron_h(values: Values) -> Values:
    """The pattern says how many layers there are."""
    pattern = values.get("layers_block_type") or values.get("hybrid_override_pattern")
    return {"num_hidden_layers": len(pattern)} if isinstance(pattern, (str, list)) and pattern else {}


def kimi_linear(values: Values) -> Values:
    """Published configs keep the linear layers' fields in a group of their own, and count layers from 1."""
    own = values.get("linear_attn_config")
    if not isinstance(own, Mapping):
        return {}
    found = {
        ours: own[theirs]
        for ours, theirs in (("linear_head_dim", "head_dim"), ("linear_num_heads", "num_heads"),
                             ("linear_conv_kernel_dim", "short_conv_kernel_size"))
        if theirs in own
    }  # fmt: skip
    full, layers = own.get("full_attn_layers"), values.get("num_hidden_layers")
    if (
        values.get("layer_types") is None
        and isinstance(full, list)
        and isinstance(layers, int)
        and layers <= MAX_LAYERS
    ):
        found["layer_types"] = [
            "full_attention" if layer + 1 in full else "linear_attention" for layer in range(layers)
        ]
    return found


def minimax(values: Values) -> Values:
    """The makers' configs list 1 for a layer of full attention, 0 for a linear one."""
    listed = values.get("attn_type_list")
    if values.get("layer_types") is not None or not isinstance(listed, list):
        return {}
    return {"layer_types": ["full_attention" if kind else "linear_attention" for kind in listed]}


def deepseek_v4(values: Values) -> Values:
    """Published configs list how many tokens each layer compresses into a row, 0 for none; layers for prediction
    follow those of the model."""
    listed, layers = values.get("compress_ratios"), values.get("num_hidden_layers")
    if values.get("layer_types") is not None or not isinstance(listed, list) or not isinstance(layers, int):
        return {}
    words = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    return {"layer_types": [words.get(rate, str(rate)) for rate in listed[:layers]]}
