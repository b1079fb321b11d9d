"""GGML's block formats: what a block's bytes mean. How large blocks are stands in `shape.formats`.

A block is cut into groups that share a scale s and perhaps a minimum m; a weight is s * q + m. d, dmin, m: float16.

    format   block, group  bytes, in order                                        weight
    q8_0     32            d, 32 x int8                                           d q
    q4_0     32            d, 16 nibble pairs                                     d (q - 8)
    q4_1     32            d, m, 16 nibble pairs                                  d q + m
    q5_0     32            d, 4 of fifth bits, 16 nibble pairs                    d (q - 16)
    q5_1     32            d, m, 4 of fifth bits, 16 nibble pairs                 d q + m
    q2_k     256, 16       16 (s low, m high half), 64 of 2 bits, d, dmin         d s q - dmin m
    q3_k     256, 16       32 of third bits, 64 of 2 bits, 12 of 6-bit s, d       d (s - 32) (q - 4)
    q4_k     256, 32       d, dmin, 12 of 6-bit s and m, 128 nibble pairs         d s q - dmin m
    q5_k     256, 32       as q4_k, with 32 of fifth bits before the nibbles      d s q - dmin m
    q6_k     256, 16       128 nibble pairs, 64 of 2 bits, 16 x int8 s, d         d s (q - 32)
    iq4_nl   32            d, 16 nibble pairs                                     d IQ4[q]
    mxfp4    32            exponent e, 16 nibble pairs                            2^(e - 127) E2M1[q]
    iq4_xs   256, 32       d, 2 and 4 of 6-bit s, 128 nibble pairs                d (s - 32) IQ4[q]

Nibble pairs come in runs of 16 bytes (32 in q4_k and q5_k, 64 in q6_k): the low halves are the numbers of a run's first
half in order, the high halves those of its second. Two bits come in runs of 32 bytes: the lowest two bits of each byte
are a run's first 32 numbers, and so on. Byte j of the third and fifth bits holds those of numbers j, j + 32, ...,
lowest first (in q5_0 and q5_1 they are one little-endian number).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


class Groups(NamedTuple):
    """What blocks hold, float32 but for `q`: q [blocks, numbers] of any type, scale and minimum [blocks, groups]."""

    q: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray | None = None


Reader = Callable[[np.ndarray], Groups]  # of blocks, uint8 [blocks, bytes]


def dequantise(read: Reader, data: np.ndarray, out: np.ndarray) -> None:
    """data uint8 [blocks, bytes] -> out float32 [blocks, numbers]."""
    q, scale, minimum = read(data)
    groups = (len(data), scale.shape[1], -1)
    np.multiply(q.reshape(groups), scale[:, :, None], out=out.reshape(groups), dtype=np.float32)
    if minimum is not None:
        out.reshape(groups)[...] += minimum[:, :, None]


def _half(data: np.ndarray, byte: int) -> np.ndarray:
    """The float16 at `byte` of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(data[:, byte : byte + 2]).view(np.float16).astype(np.float32)


def _bits(packed: np.ndarray, count: int, run: int) -> np.ndarray:
    """Numbers of `count` bits in runs of `run` bytes: [blocks, bytes] -> uint8 [blocks, bytes * 8 / count]."""
    shifts = np.arange(0, 8, count, dtype=np.uint8)[:, None]
    return (packed.reshape(len(packed), -1, 1, run) >> shifts & (2**count - 1)).reshape(len(packed), -1)


def _nibbles(packed: np.ndarray, run: int = 16) -> np.ndarray:
    return _bits(packed, 4, run)


def _q8_0(data: np.ndarray) -> Groups:
    return Groups(data[:, 2:].view(np.int8), _half(data, 0))


def _q4_0(data: np.ndarray) -> Groups:
    return Groups(_nibbles(data[:, 2:]).view(np.int8) - 8, _half(data, 0))


def _q4_1(data: np.ndarray) -> Groups:
    return Groups(_nibbles(data[:, 4:]), _half(data, 0), _half(data, 2))


def _fifth(packed: np.ndarray) -> np.ndarray:
    """One bit per number of [blocks, 4], lowest first -> 0 or 16."""
    return np.unpackbits(packed, axis=1, bitorder="little") << 4


def _q5_0(data: np.ndarray) -> Groups:
    return Groups((_nibbles(data[:, 6:]) | _fifth(data[:, 2:6])).view(np.int8) - 16, _half(data, 0))


def _q5_1(data: np.ndarray) -> Groups:
    return Groups(_nibbles(data[:, 8:]) | _fifth(data[:, 4:8]), _half(data, 0), _half(data, 2))


def _q2_k(data: np.ndarray) -> Groups:
    scale, minimum = data[:, :16] & 15, data[:, :16] >> 4
    return Groups(_bits(data[:, 16:80], 2, 32), _half(data, 80) * scale, -_half(data, 82) * minimum)


def _q3_k(data: np.ndarray) -> Groups:
    low, high = _bits(data[:, 96:104], 4, 8), _bits(data[:, 104:108], 2, 4)
    scale = (low | high << 4).view(np.int8) - 32
    q = _bits(data[:, 32:96], 2, 32) | _bits(data[:, :32], 1, 32) << 2
    return Groups(q.view(np.int8) - 4, _half(data, 108) * scale)


def _scales_k(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[blocks, 12] -> scales and minima, each [blocks, 8]. The first four of both lie in the low six bits of bytes 0-3
    and 4-7; of the other four, the low halves are the nibbles of bytes 8-11, the rest the top bits of bytes 0-7."""
    first, high, low = packed[:, :8] & 63, packed[:, :8] >> 6 << 4, packed[:, 8:]
    scale = np.concatenate([first[:, :4], low & 15 | high[:, :4]], axis=1)
    return scale, np.concatenate([first[:, 4:], low >> 4 | high[:, 4:]], axis=1)


def _q4_k(data: np.ndarray) -> Groups:
    scale, minimum = _scales_k(data[:, 4:16])
    return Groups(_nibbles(data[:, 16:], 32), _half(data, 0) * scale, -_half(data, 2) * minimum)


def _q5_k(data: np.ndarray) -> Groups:
    scale, minimum = _scales_k(data[:, 4:16])
    q = _nibbles(data[:, 48:], 32) | _bits(data[:, 16:48], 1, 32) << 4
    return Groups(q, _half(data, 0) * scale, -_half(data, 2) * minimum)


def _q6_k(data: np.ndarray) -> Groups:
    q = _nibbles(data[:, :128], 64) | _bits(data[:, 128:192], 2, 32) << 4
    return Groups(q.view(np.int8) - 32, _half(data, 208) * data[:, 192:208].view(np.int8))


def _iq4_nl(data: np.ndarray) -> Groups:
    return Groups(IQ4[_nibbles(data[:, 2:])], _half(data, 0))


def _iq4_xs(data: np.ndarray) -> Groups:
    low, high = _bits(data[:, 4:8], 4, 1), _bits(data[:, 2:4], 2, 1)
    return Groups(IQ4[_nibbles(data[:, 8:])], _half(data, 0) * ((low | high << 4).view(np.int8) - 32))


def _mxfp4(data: np.ndarray) -> Groups:
    exponent = data[:, :1].astype(np.int32) - 127
    scale = np.where(exponent == 128, np.float32(np.nan), np.ldexp(np.float32(1), np.minimum(exponent, 127)))
    return Groups(E2M1[_nibbles(data[:, 1:])], scale)


READERS: dict[str, Reader] = {
    "q8_0": _q8_0, "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q2_k": _q2_k, "q3_k": _q3_k,
    "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "iq4_nl": _iq4_nl, "iq4_xs": _iq4_xs,
    "mxfp4": _mxfp4,
}  # fmt: skip


def write_q4_0(q: np.ndarray, d: np.ndarray) -> np.ndarray:
    """q integers from -8 to 7 [blocks, 32], d float16 [blocks] -> uint8 [blocks, 18]."""
    return np.concatenate([_stored_half(d), _stored_nibbles(q + 8)], axis=1)


def write_q5_0(q: np.ndarray, d: np.ndarray) -> np.ndarray:
    """q integers from -16 to 15 [blocks, 32], d float16 [blocks] -> uint8 [blocks, 22]."""
    fifth = np.packbits(q >= 0, axis=1, bitorder="little")
    return np.concatenate([_stored_half(d), fifth, _stored_nibbles(q & 15)], axis=1)


def write_q8_0(q: np.ndarray, d: np.ndarray) -> np.ndarray:
    """q integers from -128 to 127 [blocks, 32], d float16 [blocks] -> uint8 [blocks, 34]."""
    return np.concatenate([_stored_half(d), q.astype(np.int8).view(np.uint8)], axis=1)


def write_mxfp4(q: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """q E2M1 codes from 0 to 15 [blocks, 32], exponent uint8 [blocks] -> uint8 [blocks, 17]."""
    return np.concatenate([exponent[:, None], _stored_nibbles(q)], axis=1)


def _stored_half(d: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(d, np.float16).view(np.uint8).reshape(-1, 2)


def _stored_nibbles(q: np.ndarray) -> np.ndarray:
    """From 0 to 15, [blocks, 32] -> [blocks, 16]."""
    q = q.astype(np.uint8)
    return q[:, :16] | q[:, 16:] << 4
