"""Bytes per weight as a checkpoint stores them, read from its own `quantization_config`.

Formats: fp8 (DeepSeek, Qwen), GPTQ, AWQ, compressed-tensors, ModelOpt, MXFP4 (gpt-oss), bitsandbytes. Layers a
checkpoint leaves in 16 bits are found by its own list, tensor by tensor.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from headway.core.errors import BadInput
from headway.shape.formats import FORMATS, Format, grouped_width
from headway.shape.tensors import Tensor

NEVER = {"embed", "gathered", "head", "router", "norm"}  # parts these quantisers leave in 16 bits


class Stored(NamedTuple):
    """How a checkpoint stores weights: `size(tensor)` bytes per number, `format` of most, `kv` bytes or None."""

    size: Callable[[Tensor], float]
    format: str
    kv: float | None


def stored(config: Mapping[str, Any], dtype: Format) -> Stored:
    """Read `quantization_config` (empty mapping: everything in `dtype`)."""
    wide = dtype.width
    if not config:
        return Stored(lambda tensor: wide, dtype.name, None)
    method = config.get("quant_method")
    if method is None and "quant_algo" in config:
        method = "modelopt"
    number_format, ignored, kv = _read(str(method), config)
    packed = FORMATS[number_format].width
    if number_format == "int4" and isinstance(group := _group_size(config), int) and group > 0:
        packed = grouped_width(4, group)

    experts = FORMATS["mxfp4"] if config.get("expert_dtype") == "fp4" else None  # DeepSeek V4, beside fp8

    def size(tensor: Tensor) -> float:
        if tensor.part in NEVER or len(tensor.shape) < 2 or "conv1d" in tensor.name or tensor.name.endswith("_bias"):
            return wide
        if tensor.part == "experts" and experts is not None:
            return experts.width
        module = tensor.name.removesuffix(".weight")
        return wide if any(_matches(pattern, module) for pattern in ignored) else packed

    return Stored(size, number_format, kv)


def _read(method: str, config: Mapping[str, Any]) -> tuple[str, list[str], float | None]:
    """(number format, patterns of modules left alone, bytes per cached number) of a quantisation config."""
    ignored = config.get("modules_to_not_convert") or config.get("ignore") or config.get("exclude_modules") or []
    if method in ("fp8", "fbgemm_fp8", "finegrained_fp8"):
        return "fp8", ignored, None
    if method == "mxfp4":
        return "mxfp4", ignored, None
    if method in ("gptq", "awq", "auto-round", "autoround"):
        return _integer(config.get("bits", config.get("w_bit", 4))), ignored, None
    if method in ("bitsandbytes", "bnb"):
        return ("int4" if config.get("load_in_4bit") else "int8"), ignored, None
    if method == "compressed-tensors":
        return _compressed(config), ignored, 1.0 if _bits(config.get("kv_cache_scheme")) == 8 else None
    if method == "modelopt":
        inner = config.get("quantization", config)
        algorithm = str(inner.get("quant_algo", "")).upper()
        for name, number_format in (("NVFP4", "nvfp4"), ("W4A8", "int4"), ("FP8", "fp8"), ("INT4", "int4")):
            if name in algorithm:
                kv = inner.get("kv_cache_quant_algo") or config.get("kv_cache_scheme")
                return number_format, list(inner.get("exclude_modules") or ignored), 1.0 if kv else None
    accepted = "fp8, mxfp4, gptq, awq, bitsandbytes, compressed-tensors, modelopt"
    raise BadInput("config.json: quantization_config", f"{method!r} is not known; accepted: {accepted}")


def _compressed(config: Mapping[str, Any]) -> str:
    groups = list((config.get("config_groups") or {}).values())
    weights = (groups[0] or {}).get("weights") if groups else None
    bits = _bits(weights)
    if weights is None or bits is None:
        raise BadInput("config.json: quantization_config", "config_groups names no weights with num_bits")
    if weights.get("type") == "float":
        return {8: "fp8", 4: "nvfp4" if "nvfp4" in str(config.get("format")) else "fp4"}.get(bits) or _integer(bits)
    return _integer(bits)


def _bits(scheme: Any) -> int | None:
    return scheme.get("num_bits") if isinstance(scheme, Mapping) else None


def _integer(bits: Any) -> str:
    if bits not in (4, 8):
        raise BadInput("config.json: quantization_config bits", f"{bits!r}; accepted: 4 or 8")
    return f"int{bits}"


def _group_size(config: Mapping[str, Any]) -> int | None:
    for group in (config.get("config_groups") or {}).values():
        return ((group or {}).get("weights") or {}).get("group_size")
    return config.get("group_size", config.get("q_group_size"))


def _matches(pattern: str, module: str) -> bool:
    """Does an ignore entry ("re:regex", "glob*", or a name or part of one) cover this module?"""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if "*" in pattern:
        return fnmatch.fnmatch(module, pattern)
    # wrappers name their language model's modules with one more level, "language_model.model.layers..."
    return re.search(rf"(^|\.){re.escape(pattern.removeprefix('language_model.'))}(\.|$)", module) is not None
