"""Number formats: the one table of what they are called in every kind of file, what they take, what multiplies them.

A format cuts a row into blocks. `bytes` counts everything a block stores, scales and zero points included; `nominal` is
the text's figure without them (s_W and s_KV of B1 and B3), which only formats have that a user may ask for. Blocks are
ggml's (ggml-common.h) where GGUF has the type; GPTQ and AWQ keep one 16-bit scale and a 4-bit zero per group of 128.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from headway.core.errors import BadInput


class Format(msgspec.Struct, frozen=True):
    """How numbers are stored.

    Attributes:
        name: what Headway calls it.
        numbers, bytes: of one block.
        nominal: bytes per number without scales, 0 = not a precision to ask for.
        multiplied: the arithmetic GPUs multiply it in: their units' own, or 16 bits after unpacking.
        gguf: type number in a GGUF file, None = not a type of it.
        dtype: name in a safetensors header, "" = not one of it.
        measured: the precision under which measured deployments are filed, "" = none was measured.
        aliases: other names, those of config.json among them.
    """

    name: str
    numbers: int
    bytes: int
    nominal: float = 0.0
    multiplied: str = "bf16"
    gguf: int | None = None
    dtype: str = ""
    measured: str = ""
    aliases: tuple[str, ...] = ()

    @property
    def width(self) -> float:
        """Bytes per stored number."""
        return self.bytes / self.numbers

    @property
    def multiplied_on_cpu(self) -> str:
        """The arithmetic of our own kernels: blocks of integers meet activations rounded to integers."""
        return "int8" if self.numbers > 1 else self.multiplied


_TABLE = (
    Format("f32", 1, 4, 4.0, "fp32", gguf=0, dtype="F32", aliases=("fp32", "float32")),
    Format("bf16", 1, 2, 2.0, gguf=30, dtype="BF16", measured="bf16", aliases=("bfloat16",)),
    Format("f16", 1, 2, 2.0, gguf=1, dtype="F16", measured="bf16", aliases=("fp16", "float16")),
    Format("fp8", 1, 1, 1.0, "fp8", dtype="F8_E4M3", measured="fp8"),
    Format("int8", 1, 1, 1.0), Format("w8a8", 1, 1, 1.0, "int8"),
    Format("int4", 256, 133, 0.5, measured="int4", aliases=("awq", "gptq", "w4a16")),
    Format("fp4", 16, 9, 0.5, "fp4", measured="fp4"),
    Format("nvfp4", 16, 9, 0.5, "fp4", measured="fp4"),
    Format("mxfp4", 32, 17, 0.5, gguf=39, measured="fp4"),
    Format("q8_0", 32, 34, gguf=8), Format("q8_1", 32, 36, gguf=9), Format("q8_k", 256, 292, gguf=15),
    Format("q6_k", 256, 210, gguf=14), Format("q5_k", 256, 176, gguf=13), Format("q5_0", 32, 22, gguf=6),
    Format("q5_1", 32, 24, gguf=7), Format("q4_k", 256, 144, gguf=12), Format("q4_0", 32, 18, gguf=2),
    Format("q4_1", 32, 20, gguf=3), Format("q3_k", 256, 110, gguf=11), Format("q2_k", 256, 84, gguf=10),
    Format("iq4_nl", 32, 18, gguf=20), Format("iq4_xs", 256, 136, gguf=23), Format("iq3_s", 256, 110, gguf=21),
    Format("iq3_xxs", 256, 98, gguf=18), Format("iq2_s", 256, 82, gguf=22), Format("iq2_xs", 256, 74, gguf=17),
    Format("iq2_xxs", 256, 66, gguf=16), Format("iq1_m", 256, 56, gguf=29), Format("iq1_s", 256, 50, gguf=19),
    Format("tq1_0", 256, 54, gguf=34), Format("tq2_0", 256, 66, gguf=35),
    Format("u8", 1, 1, dtype="U8"), Format("i8", 1, 1, gguf=24, dtype="I8"), Format("i16", 1, 2, gguf=25),
    Format("i32", 1, 4, gguf=26, dtype="I32"), Format("i64", 1, 8, gguf=27, dtype="I64"), Format("f64", 1, 8, gguf=28),
)  # fmt: skip
FORMATS = {format.name: format for format in _TABLE}
BY_GGUF_TYPE = {format.gguf: format for format in _TABLE if format.gguf is not None}
BY_DTYPE = {format.dtype: format for format in _TABLE if format.dtype}
MEASURED = tuple(dict.fromkeys(format.measured for format in _TABLE if format.measured))
_NAMES = FORMATS | {alias: format for format in _TABLE for alias in format.aliases}


def known_format(name: str) -> Format | None:
    """The format of this name or alias, whatever the case."""
    return _NAMES.get(name.lower())


def find_format(name: str, field: str = "--precision") -> Format:
    """The same.

    Raises:
        BadInput: there is none; names those that can be asked for.
    """
    format = known_format(name)
    if format is None:
        raise BadInput(field, f"{name!r} is not a number format; accepted: {', '.join(precisions())}")
    return format


def asked_for(text: str) -> Format | None:
    """The precision that a lower-case text begins with ("fp8_e4m3", "w4a16-asym")."""
    names = (name for name, format in _NAMES.items() if format.nominal and text.startswith(name))
    return next((_NAMES[name] for name in names), None)


def precisions() -> list[str]:
    """Names of the formats that a user may ask for."""
    return [format.name for format in _TABLE if format.nominal]


def nominal_bytes(name: str, field: str = "--precision") -> float:
    """s_W or s_KV of a named format."""
    format = find_format(name, field)
    if not format.nominal:
        raise BadInput(field, f"{name!r} has no nominal width; accepted: {', '.join(precisions())}")
    return format.nominal


def grouped_width(bits: int, group: int) -> float:
    """Bytes per number of integers quantised in groups, each with a 16-bit scale and a zero as wide as they are."""
    return (bits + (16 + bits) / group) / 8


def stored_bytes(format: str, shape: Sequence[int]) -> int:
    """Bytes a tensor of `shape` takes in `format` (Python integers: cannot overflow).

    Raises:
        ValueError: the last dimension is not a whole number of blocks.
    """
    block = FORMATS[format]
    if shape and shape[-1] % block.numbers:
        raise ValueError(f"rows of {shape[-1]} numbers are not a whole number of {format} blocks of {block.numbers}")
    return math.prod(shape) // block.numbers * block.bytes
