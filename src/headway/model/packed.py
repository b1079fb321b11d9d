"""Packed layers of quantised checkpoints, each kind as the matrix of blocks or halves that it stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headway.core.errors import ModelFileError
from headway.ops import blocks
from headway.ops.weight import Deferred, Origin, Weight
from headway.shape.formats import stored_bytes

BLOCK = 32  # numbers that share a scale in the formats written here
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word of eight the gemm layout puts each of eight neighbours

_WRITERS = {"q4_0": blocks.write_q4_0, "q5_0": blocks.write_q5_0, "q8_0": blocks.write_q8_0}
_RANGES = {"q4_0": (-8, 7), "q5_0": (-16, 15), "q8_0": (-128, 127)}


class Codes(NamedTuple):
    """codes: integers [out, in], their zero points subtracted. scale: float32 [out, groups], each for as many
    neighbours. group: of each column, where they are shuffled, else None."""

    codes: np.ndarray
    scale: np.ndarray
    group: np.ndarray | None = None


@dataclass(frozen=True)
class _Joined:
    """Where several tensors of a file lie. The first stands for all: they are written together."""

    origins: tuple[Origin, ...]

    @property
    def start(self) -> int:
        return self.origins[0].start

    def fetch(self) -> None:
        for origin in self.origins:
            origin.fetch()

    def forget(self) -> None:
        for origin in self.origins:
            origin.forget()

    def file_identity(self) -> str:
        return " ".join(dict.fromkeys(origin.file_identity() for origin in self.origins))

    def part(self, start: int, size: int) -> Origin:
        return self


@dataclass(frozen=True)
class PackedMatrix:
    """The tensors of one quantised matrix.

    Attributes:
        where: file or folder and matrix, for errors.
        parts: by the last part of their name.
    """

    where: str
    parts: Mapping[str, Weight]

    def get(self, part: str, *formats: str) -> np.ndarray:
        """A tensor's numbers; floats as float32."""
        weight = self.weight(part, *formats)
        kinds = {"i32": np.int32, "i64": np.int64, "i8": np.int8, "u8": np.uint8, "fp8": np.uint8}
        if weight.format in kinds:
            return weight.data.view(kinds[weight.format]).reshape(weight.shape)
        return weight.dequantise()

    def weight(self, part: str, *formats: str) -> Weight:
        found = self.parts.get(part)
        if found is None:
            raise ModelFileError(f"{self.where}: its tensor {part} is missing")
        if found.format not in (formats or ("f16", "bf16", "f32")):
            raise ModelFileError(f"{self.where}: its tensor {part} is stored as {found.format.upper()}")
        return found

    @property
    def origin(self) -> Origin | None:
        origins = tuple(weight.origin for weight in self.parts.values() if weight.origin is not None)
        return _Joined(origins) if origins else None

    def fits(self, shape: tuple[int, ...], part: str, expected: tuple[int, ...]) -> None:
        if shape != expected:
            raise ModelFileError(f"{self.where}: its tensor {part} is of shape {shape}, not {expected}")


Made = tuple[str, Weight, tuple[str, ...]]  # name of the matrix, itself, which parts of the layer it is made of
Kinds = Mapping[
    str, Callable[[PackedMatrix, str], Made]
]  # end of a name that tells a quantised layer -> how it is read


def _e4m3() -> np.ndarray:
    """The value of each byte, float32 [256] (arXiv 2209.05433): no infinities, NaN where all but the sign is set."""
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, byte & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value[byte & 127 == 127] = np.nan
    return np.where(byte & 128, -value, value).astype(np.float32)


E4M3 = _e4m3()


def gptq(layer: PackedMatrix, name: str, symmetric: bool, zero_is_less_one: bool) -> Made:
    """qweight int32 [in / codes per word, out], qzeros [groups, out / codes per word], scales [groups, out]."""
    words, zeros, scales = layer.weight("qweight", "i32"), layer.weight("qzeros", "i32"), layer.weight("scales")
    groups, out = scales.shape if len(scales.shape) == 2 else (0, 0)
    bits = 32 * zeros.shape[-1] // out if out else 0
    if bits not in (4, 8):
        raise ModelFileError(f"{layer.where}: its codes have {bits} bits; 4 and 8 are supported")
    inputs = words.shape[0] * 32 // bits
    layer.fits(words.shape, "qweight", (inputs * bits // 32, out))
    layer.fits(zeros.shape, "qzeros", (groups, out * bits // 32))
    group_of = layer.get("g_idx", "i32") if "g_idx" in layer.parts else None
    if group_of is not None:
        layer.fits(group_of.shape, "g_idx", (inputs,))
        if not 0 <= group_of.min() <= group_of.max() < groups:
            raise ModelFileError(f"{layer.where}: g_idx names groups that are none of its {groups}")
        if (group_of == np.arange(inputs) // -(-inputs // groups)).all():
            group_of = None

    def read() -> Codes:
        codes = _fields(layer.get("qweight", "i32"), bits).transpose(0, 2, 1).reshape(inputs, out)
        zero = _fields(layer.get("qzeros", "i32"), bits).reshape(groups, out) + zero_is_less_one
        return Codes((codes - _spread(zero, inputs, group_of)).T, layer.get("scales").T, group_of)

    format = {4: "q4_0" if symmetric else "q5_0", 8: "q8_0" if symmetric else ""}[bits]
    used = ("qweight", "qzeros", "scales", "g_idx")
    return _coded(layer, "weight", (out, inputs), groups, format, read, used, group_of)


def awq(layer: PackedMatrix, name: str) -> Made:
    """qweight int32 [in, out / 8], qzeros [groups, out / 8], scales [groups, out]."""
    words, zeros, scales = layer.weight("qweight", "i32"), layer.weight("qzeros", "i32"), layer.weight("scales")
    groups, out = scales.shape if len(scales.shape) == 2 else (0, 0)
    inputs = words.shape[0]
    layer.fits(words.shape, "qweight", (inputs, out // 8))
    layer.fits(zeros.shape, "qzeros", (groups, out // 8))

    def read() -> Codes:
        codes = _fields(layer.get("qweight", "i32"), 4)[..., AWQ_ORDER].reshape(inputs, out)
        zero = _fields(layer.get("qzeros", "i32"), 4)[..., AWQ_ORDER].reshape(groups, out)
        return Codes((codes - _spread(zero, inputs)).T, layer.get("scales").T)

    used = ("qweight", "qzeros", "scales")
    return _coded(layer, "weight", (out, inputs), groups, "q5_0", read, used)


def integers(layer: PackedMatrix, name: str) -> Made:
    """weight_packed int32 [out, in / codes per word], weight_scale [out, groups], weight_shape [2]; asymmetric:
    weight_zero_point int32 [out / codes per word, groups]; activation order: weight_g_idx [in]."""
    words, scales = layer.weight("weight_packed", "i32"), layer.weight("weight_scale")
    shape = tuple(layer.get("weight_shape", "i64", "i32").tolist())
    if len(shape) != 2 or len(words.shape) != 2 or len(scales.shape) != 2 or shape[0] != words.shape[0]:
        raise ModelFileError(f"{layer.where}: its tensors weight_packed and weight_shape do not fit each other")
    out, inputs = shape
    bits = next((bits for bits in (4, 8) if words.shape[1] == -(-inputs * bits // 32)), 0)
    if not bits:
        raise ModelFileError(f"{layer.where}: {inputs} codes in {words.shape[1]} words; 4 and 8 bits are supported")
    groups = scales.shape[1]
    layer.fits(scales.shape, "weight_scale", (out, groups))
    zeros = layer.parts.get("weight_zero_point")
    if zeros is not None:
        layer.fits(zeros.shape, "weight_zero_point", (-(-out * bits // 32), groups))
    group_of = layer.get("weight_g_idx", "i32", "i64") if "weight_g_idx" in layer.parts else None

    def read() -> Codes:
        codes = _fields(layer.get("weight_packed", "i32"), bits).reshape(out, -1)[:, :inputs]
        if zeros is None:
            return Codes(codes - 2 ** (bits - 1), layer.get("weight_scale"), group_of)
        words = _fields(layer.get("weight_zero_point", "i32"), bits)
        zero = words.transpose(0, 2, 1).reshape(-1, groups)[:out]
        return Codes(codes - _spread(zero.T, inputs, group_of).T, layer.get("weight_scale"), group_of)

    format = {4: "q4_0" if zeros is None else "q5_0", 8: "q8_0" if zeros is None else ""}[bits]
    used = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    return _coded(layer, "weight", (out, inputs), groups, format, read, used, group_of)


def one_byte(layer: PackedMatrix, name: str) -> Made:
    """weight of one-byte numbers [out, in]: integers with weight_scale [out or 1, groups], or FP8 with weight_scale of
    any such shape or weight_scale_inv per square block; floats are left as they are."""
    weight = layer.parts["weight"]
    if weight.format not in ("i8", "fp8") or len(weight.shape) != 2:
        return name, weight, ("weight",)
    out, inputs = weight.shape
    part = next((part for part in ("weight_scale_inv", "weight_scale") if part in layer.parts), None)
    used = ("weight", "weight_scale", "weight_scale_inv", "weight_zero_point")
    if part is None:
        raise ModelFileError(f"{layer.where}: its tensor weight_scale is missing")
    shape = layer.weight(part).shape
    rows, columns = shape if len(shape) == 2 else (*shape, 1) if len(shape) == 1 else (1, 1)
    if not (1 <= rows <= out and 1 <= columns <= inputs):
        raise ModelFileError(f"{layer.where}: its tensor {part} is of shape {shape}, the weight of {weight.shape}")
    tall, wide = _run(out, rows), _run(inputs, columns)

    def scale() -> np.ndarray:
        return np.repeat(layer.get(part).reshape(rows, columns), tall, axis=0)[:out]

    if weight.format == "i8":
        zero = layer.get("weight_zero_point", "i8").any() if "weight_zero_point" in layer.parts else False
        if zero:
            raise ModelFileError(f"{layer.where}: integers with zero points are not supported")

        def read() -> Codes:
            return Codes(layer.get("weight", "i8").astype(np.int16), scale())

        return _coded(layer, name, (out, inputs), columns, "q8_0", read, used)

    def make() -> np.ndarray:
        values = E4M3[layer.get("weight", "fp8")] * np.repeat(scale(), wide, axis=1)[:, :inputs]
        return values.astype(np.float16).view(np.uint8).reshape(-1)

    return name, _deferred(name, (out, inputs), "f16", make, layer), used


def _run(size: int, parts: int) -> int:
    """Neighbours that share a scale, of `size` in `parts`: a power of two where that fits, as blocks have (128)."""
    run = -(-size // parts)
    power = 1 << (run - 1).bit_length()
    return power if -(-size // power) == parts else run


def mxfp4(layer: PackedMatrix, name: str) -> Made:
    """NAME_blocks uint8 [..., groups, 16], the lower half of a byte first; NAME_scales uint8 [..., groups]."""
    part = name.removesuffix("_blocks")
    stored, scales = layer.weight(f"{part}_blocks", "u8"), layer.weight(f"{part}_scales", "u8")
    if len(stored.shape) < 3 or stored.shape[-1] != BLOCK // 2:
        raise ModelFileError(
            f"{layer.where}: its tensor {part}_blocks is of shape {stored.shape}, not [..., groups, 16]"
        )
    layer.fits(scales.shape, f"{part}_scales", stored.shape[:-1])
    shape = (*stored.shape[:-2], stored.shape[-2] * BLOCK)

    def make() -> np.ndarray:
        pairs = layer.get(f"{part}_blocks", "u8").reshape(-1, BLOCK // 2)
        codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(-1, BLOCK)
        return blocks.write_mxfp4(codes, layer.get(f"{part}_scales", "u8").reshape(-1)).reshape(-1)

    return part, _deferred(part, shape, "mxfp4", make, layer), (f"{part}_blocks", f"{part}_scales")


def _coded(
    layer: PackedMatrix, name: str, shape: tuple[int, int], groups: int, format: str, read: Callable[[], Codes],
    used: tuple[str, ...], group_of: np.ndarray | None = None,
) -> Made:  # fmt: skip
    """Codes in a format of blocks if each block has one scale, else as halves. format "": as halves."""
    inputs = shape[1]
    run = -(-inputs // groups) if groups else 0
    if not groups or -(-inputs // run) != groups:
        raise ModelFileError(f"{layer.where}: {groups} groups of scales for {inputs} inputs")
    in_blocks = format and group_of is None and inputs % BLOCK == 0 and run % BLOCK == 0

    def make() -> np.ndarray:
        codes, scale, group = read()
        if not in_blocks:
            return (codes * _spread(scale.T, inputs, group).T).astype(np.float16, order="C").view(np.uint8).reshape(-1)
        low, high = _RANGES[format]
        if codes.min() < low or codes.max() > high:
            raise ModelFileError(f"{layer.where}: codes are not from {low} to {high}, as the config says")
        with np.errstate(over="ignore"):
            each = np.repeat(scale.astype(np.float16), run // BLOCK, axis=1)[:, : inputs // BLOCK]
        return _WRITERS[format](np.ascontiguousarray(codes).reshape(-1, BLOCK), each.reshape(-1)).reshape(-1)

    return name, _deferred(name, shape, format if in_blocks else "f16", make, layer), used


def _deferred(
    name: str, shape: tuple[int, ...], format: str, make: Callable[[], np.ndarray], layer: PackedMatrix
) -> Weight:
    return Weight(name, shape, format, Deferred(stored_bytes(format, shape), make), layer.origin)


def _fields(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes in 32-bit words, the lowest first: [...] -> int16 [..., 32 / bits]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return (words.view(np.uint32)[..., None] >> shifts & (2**bits - 1)).astype(np.int16)


def _spread(per_group: np.ndarray, inputs: int, group_of: np.ndarray | None = None) -> np.ndarray:
    """[groups, ...] -> [inputs, ...]: of each input's group."""
    if group_of is not None:
        return per_group[group_of]
    return np.repeat(per_group, -(-inputs // len(per_group)), axis=0)[:inputs]
