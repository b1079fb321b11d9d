"""A weight as it lies in the checkpoint: name, shape, storage format, raw bytes. Quantisation is a weight type.

Block formats are GGML's: 32 numbers of one row share a float16 scale d (and, in q4_1, a float16 minimum m). In the
4-bit formats byte j of a block holds number j in its low half and number j + 16 in its high half.

    q8_0   d, 32 x int8        w = d * q
    q4_0   d, 16 bytes         w = d * (q - 8)
    q4_1   d, m, 16 bytes      w = d * q + m
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Storage format -> (numbers per block, bytes per block).
FORMATS = {"f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "q8_0": (32, 34), "q4_0": (32, 18), "q4_1": (32, 20)}

_BLOCKS_AT_ONCE = 1 << 14  # dequantised together: temporaries stay in the CPU's cache


def stored_bytes(format: str, shape: Sequence[int]) -> int:
    """Bytes a tensor of `shape` takes in `format` (Python integers: cannot overflow).

    Raises:
        ValueError: the last dimension is not a whole number of blocks.
    """
    numbers, size = FORMATS[format]
    if shape and shape[-1] % numbers:
        raise ValueError(f"rows of {shape[-1]} numbers are not a whole number of {format} blocks of {numbers}")
    return math.prod(shape) // numbers * size


@dataclass(frozen=True)
class Weight:
    """A tensor of a checkpoint, still in its stored form (usually a view of the mapped file, so free to hold).

    Attributes:
        name: as in the file; for error messages.
        shape: (out, in) of a matrix, (n,) of a vector.
        format: "f32", "f16", "bf16", "q8_0", "q4_0" or "q4_1" (block formats as defined by GGUF).
        data: uint8 [bytes], row-major, rows of a block format one after another.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    data: np.ndarray

    def dequantise(self) -> np.ndarray:
        """The whole weight as float32 of `shape`. Of an f32 weight this is a view, not a copy."""
        if self.format == "f32":
            return self.data.view(np.float32).reshape(self.shape)
        if self.format == "f16":
            return self.data.view(np.float16).astype(np.float32).reshape(self.shape)
        if self.format == "bf16":  # the upper half of a float32
            return (self.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(self.shape)
        numbers, size = FORMATS[self.format]
        blocks = self.data.reshape(-1, size)
        out = np.empty((len(blocks), numbers), np.float32)
        for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
            part = slice(start, start + _BLOCKS_AT_ONCE)
            _DEQUANTISE[self.format](blocks[part], out[part])
        return out.reshape(self.shape)


def _half(blocks: np.ndarray, byte: int) -> np.ndarray:
    """The float16 at `byte` of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, byte : byte + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    """packed uint8 [blocks, 16] -> out [blocks, 32], values 0 to 15."""
    out[:, :16] = packed & 0x0F
    out[:, 16:] = packed >> 4


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8
    out *= _half(blocks, 0)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


_DEQUANTISE = {"q8_0": _q8_0, "q4_0": _q4_0, "q4_1": _q4_1}
