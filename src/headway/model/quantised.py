"""Checkpoints that come quantised: their packed tensors as weights of the block formats that both backends know.

    quant_method         tensors beside each other                       becomes
    gptq                 qweight, qzeros, scales, g_idx                  q4_0, q5_0 or q8_0; f16 where g_idx shuffles
    awq (gemm)           qweight, qzeros, scales                         q5_0
    compressed-tensors   weight_packed, weight_scale, weight_shape, ...  q4_0, q5_0 or q8_0
                         weight (I8 or F8_E4M3), weight_scale            q8_0 or f16
    fp8, fbgemm_fp8      weight (F8_E4M3), weight_scale or _scale_inv    f16
    mxfp4                NAME_blocks, NAME_scales                        mxfp4

Integers keep their values exactly: a code minus its zero point fits the format, and scales are halves (others are
rounded to them). FP8 times its scale is rounded to a half. What a checkpoint says about activations is not carried
out: backends treat those as they do of any model. Nothing is unpacked before a backend asks for the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from headway.core.errors import shown
from headway.core.fields import Fields
from headway.model.packed import Kinds, PackedMatrix, awq, gptq, integers, mxfp4, one_byte
from headway.ops.weight import Weight

_ACTIVATIONS = ("input_scale", "output_scale", "k_scale", "v_scale", "input_zero_point")  # not carried out


def unpacked(config: Fields, tensors: dict[str, Weight]) -> dict[str, Weight]:
    """A folder's tensors with those of quantised layers replaced by the matrices that they stand for.

    Raises:
        ModelFileError: the way of quantising is not supported, or tensors do not fit each other.
    """
    stated = config.values.get("quantization_config") or config.values.get("compression_config")
    if stated is None:
        return tensors
    if not isinstance(stated, Mapping):
        raise config.fault("quantization_config", f"{shown(stated)} is not an object")
    fields = Fields(dict(stated), f"{config.where}: quantization_config", config.error)
    method = fields.text("quant_method")
    if method in ("bitsandbytes", "bnb"):
        raise fields.fault(
            "quant_method",
            "bitsandbytes is not supported; take the original 16-bit checkpoint (--weights int4 quantises it at load)",
        )
    if method not in METHODS:
        raise fields.fault("quant_method", f"{shown(method)} is not supported; accepted: {', '.join(METHODS)}")
    kinds = METHODS[method](fields)
    layers: dict[str, dict[str, Weight]] = {}
    for name, weight in tensors.items():
        layer, _, part = name.rpartition(".")
        layers.setdefault(layer, {})[part] = weight
    made: dict[str, Weight] = {}
    for layer, parts in layers.items():
        for part, weight in _matrices(layer, parts, kinds, config.where):
            made[f"{layer}.{part}".removeprefix(".")] = weight
    return made


def _matrices(layer: str, parts: dict[str, Weight], kinds: Kinds, where: str) -> Iterator[tuple[str, Weight]]:
    """(last part of the name, weight) of a layer's tensors, its matrices unpacked."""
    quantised = [(part, read) for part in parts for ending, read in kinds.items() if part.endswith(ending)]
    left = {part: weight for part, weight in parts.items() if part not in _ACTIVATIONS}
    for part, read in quantised:
        name, weight, used = read(PackedMatrix(f"{where}: {layer}", parts), part)
        for other in used:
            left.pop(other, None)
        yield name, replace(weight, name=f"{layer}.{name}")
    if quantised and "bias" in left and not left["bias"].dequantise().any():  # some tools write one for every layer
        del left["bias"]
    yield from left.items()


def _gptq_kinds(fields: Fields) -> Kinds:
    bits = fields.size("bits", most=32)
    if bits not in (4, 8):
        raise fields.fault("bits", f"{bits} is not supported; 4 and 8 are")
    symmetric = fields.flag("sym", True)
    version = fields.values.get("checkpoint_format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise fields.fault("checkpoint_format", f"{shown(version)} is not supported; gptq and gptq_v2 are")
    return {"qweight": lambda layer, name: gptq(layer, name, symmetric, version == "gptq")}


def _awq_kinds(fields: Fields) -> Kinds:
    version, bits = fields.values.get("version") or "gemm", fields.size("bits", default=4, most=32)
    if version not in ("gemm", "GEMM") or bits != 4:
        raise fields.fault("version", f"{shown(version)} of {bits} bits is not supported; gemm of 4 bits is")
    return {"qweight": awq}


def _compressed_kinds(fields: Fields) -> Kinds:
    accepted = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
    groups = fields.values.get("config_groups")
    each = [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []
    for format in (fields.values.get("format"), *(group.get("format") for group in each)):
        if format not in (None, "mixed-precision", *accepted):
            raise fields.fault("format", f"{shown(format)} is not supported; accepted: {', '.join(accepted)}")
    return {"weight_packed": integers, "weight": one_byte}


METHODS: dict[str, Callable[[Fields], Kinds]] = {
    "gptq": _gptq_kinds,
    "awq": _awq_kinds,
    "compressed-tensors": _compressed_kinds,
    "fp8": lambda fields: {"weight": one_byte},
    "fbgemm_fp8": lambda fields: {"weight": one_byte},
    "mxfp4": lambda fields: {"_blocks": mxfp4},
}
