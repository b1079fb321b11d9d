"""Stored weights become float32 bit for bit as the `gguf` package makes them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.ops.weight import READABLE, Weight
from headway.shape.formats import FORMATS, stored_bytes

TYPES = {format: gguf.GGMLQuantizationType[format.upper()] for format in READABLE}


def bits(x: np.ndarray) -> np.ndarray:
    """Every NaN is the same one: which a sum of two makes is the processor's choice."""
    return np.where(np.isnan(x), np.float32(np.nan), x).view(np.uint32)


def assert_same_bits(weight: Weight) -> None:
    rows = weight.data.reshape(weight.shape[0], -1)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(rows, TYPES[weight.format])
        mine = weight.dequantise()
    assert mine.shape == weight.shape
    np.testing.assert_array_equal(bits(mine), bits(expected))


QUANTISED_THERE = [
    format for format in READABLE if format[1:] not in ("2_k", "3_k", "4_k", "5_k", "6_k") and format[0] != "i"
]


@pytest.mark.parametrize("format", QUANTISED_THERE)
def test_quantised_numbers_dequantise_bit_equal(format: str) -> None:
    values = np.random.default_rng(1).standard_normal((700, 1056)).astype(np.float32)  # more than one pass of blocks
    data = gguf.quants.quantize(values, TYPES[format]).view(np.uint8).reshape(-1)
    assert_same_bits(Weight("w", values.shape, format, data))


@pytest.mark.parametrize("format", READABLE)
@settings(deadline=None)
@given(rows=st.integers(1, 5), blocks=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_any_bytes_dequantise_bit_equal(format: str, rows: int, blocks: int, seed: int) -> None:
    """Infinities, NaNs, subnormals and negative zeros included."""
    shape = (rows, blocks * FORMATS[format].numbers)
    data = np.random.default_rng(seed).integers(0, 256, stored_bytes(format, shape), np.uint8)
    if format == "mxfp4":
        data[::17] %= 255  # NaN by the standard, infinity in the package
    assert_same_bits(Weight("w", shape, format, data))


@pytest.mark.parametrize("format", READABLE)
def test_misaligned_data_is_read_right(format: str) -> None:
    shape = (2, 2 * FORMATS[format].numbers)
    size = stored_bytes(format, shape)
    data = np.random.default_rng(2).integers(0, 100, size, np.uint8)
    shifted = np.empty(size + 1, np.uint8)[1:]
    shifted[:] = data
    np.testing.assert_array_equal(
        bits(Weight("w", shape, format, shifted).dequantise()), bits(Weight("w", shape, format, data).dequantise())
    )


def test_f32_is_a_view() -> None:
    data = np.zeros(16, np.uint8)
    assert np.shares_memory(Weight("w", (4,), "f32", data).dequantise(), data)


def test_rows_must_be_whole_blocks() -> None:
    assert stored_bytes("q4_1", (3, 64)) == 3 * 2 * 20
    assert stored_bytes("q8_0", (2**40, 2**40)) == 2**80 // 32 * 34  # no overflow
    with pytest.raises(ValueError, match="33"):
        stored_bytes("q8_0", (2, 33))
