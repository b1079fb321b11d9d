"""Packing: what the file says is what the kernels get."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headway.core.errors import BadInput, ModelFileError
from headway.ops import native
from headway.ops.blocks import READERS
from headway.ops.native.backend import NativeBackend
from headway.ops.reference import ReferenceBackend
from headway.ops.weight import Weight
from headway.shape.formats import FORMATS
from tests.ops.native.harness import FACTORS, blocks, matrix, random, vector

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))


PRODUCTS = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs"]  # whose scales are products


@pytest.mark.parametrize("format", sorted(READERS.keys() - PRODUCTS))
@pytest.mark.parametrize("shape", [(1, 32), (33, 64), (31, 576), (96, 160)])
def test_block_formats_are_imported_bit_by_bit(format: str, shape: tuple[int, int]) -> None:
    weight = blocks(*shape, format)
    np.testing.assert_array_equal(NativeBackend(threads=2).prepare(weight).unpack(), weight.dequantise())


@pytest.mark.parametrize("format", PRODUCTS)
@pytest.mark.parametrize("shape", [(1, 256), (33, 512), (70, 768)])
@pytest.mark.parametrize("spread", [(0, 1), (-12, 2), (-30, -20), (10, 14)])  # subnormal and almost infinite too
def test_products_of_scales_are_rounded_to_float16s_11_bits_and_codes_kept(
    format: str, shape: tuple[int, int], spread: tuple[int, int]
) -> None:
    weight = blocks(*shape, format, spread=spread)
    q, scale, minimum = READERS[format](weight.data.reshape(-1, FORMATS[format].bytes))
    parts = np.abs(q.reshape(*scale.shape, -1).astype(np.float64) * scale[:, :, None])
    if minimum is not None:
        parts += np.abs(minimum)[:, :, None]
    got = NativeBackend(threads=2).prepare(weight).unpack()
    smallest = 2.0**-38 * max(np.abs(scale).max(), 0 if minimum is None else np.abs(minimum).max())
    bound = parts * 2.0**-11 + 128 * smallest  # rounding, and what is left of it beside a far larger scale
    assert (np.abs(got - weight.dequantise()) <= bound.reshape(shape)).all()


@pytest.mark.parametrize("format", sorted(READERS))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_block_that_is_not_finite_is_refused_by_both_backends(format: str, bad: float) -> None:
    weight = blocks(33, 256, format)
    size, byte = FORMATS[format].bytes, FACTORS.get(format, (0,))[-1]
    scale = b"\xff" if format == "mxfp4" else np.float16(bad).tobytes()
    weight.data[-size + byte :][: len(scale)] = list(scale)
    for backend in (NativeBackend(threads=2), ReferenceBackend()):
        with pytest.raises(ModelFileError, match=r"tensor blocks: .*not a number"):
            backend.prepare(weight)


@pytest.mark.parametrize("format", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("shape", [(1, 1), (33, 7), (64, 130)])
def test_16_and_32_bit_weights_keep_every_bit(format: str, shape: tuple[int, int]) -> None:
    weight = matrix(random(*shape) * 10.0 ** np.arange(shape[1]).clip(0, 4), format)
    np.testing.assert_array_equal(NativeBackend(threads=2).prepare(weight).unpack(), weight.dequantise())


SIZES = [1e-30, 1e-6, 1.0, 1e30]


@pytest.mark.parametrize("group", [16, 32, 128])
@pytest.mark.parametrize("size", SIZES)
def test_int8_at_load_errs_by_half_a_step_of_its_group(group: int, size: float) -> None:
    w = random(40, 200) * np.float32(size)
    w[3, :32] = 0
    got = NativeBackend(threads=2, weights="int8", group=group).prepare(matrix(w)).unpack()
    for start in range(0, 200, group):
        part, back = w[:, start : start + group], got[:, start : start + group]
        step = np.abs(part).max(axis=1, keepdims=True) / 127
        # A float16 scale may be off by 2^-11, so the largest number by 127 times that.
        assert (np.abs(part - back) <= (0.501 + 127 * 2.0**-11) * step).all()
    np.testing.assert_array_equal(got[3, :32], 0)


@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("size", SIZES)
def test_int4_at_load_errs_less_than_rounding_to_the_largest(group: int, size: float) -> None:
    w = random(40, 200) * np.float32(size)
    got = NativeBackend(threads=2, weights="int4", group=group).prepare(matrix(w)).unpack()
    for start in range(0, 200, group):
        part = w[:, start : start + group].astype(np.float64)
        step = np.abs(part).max(axis=1, keepdims=True) / 7
        plain = np.rint(part / step) * step
        error = ((got[:, start : start + group] - part) ** 2).sum(axis=1)
        assert error.sum() < 0.95 * ((plain - part) ** 2).sum()


def test_tables_stay_at_eight_bits() -> None:
    backend, w = NativeBackend(threads=1, weights="int4"), matrix(random(64, 128))
    narrow = backend.prepare(replace(w, part="mlp")).nbytes
    for part in ("embed", "head"):
        assert backend.prepare(replace(w, part=part)).nbytes > 1.8 * narrow


def test_bytes_held_are_counted() -> None:
    backend = NativeBackend(threads=1)
    backend.prepare(blocks(64, 64, "q4_0"))
    assert backend.weight_bytes == 64 * 64 // 32 * 18


@pytest.mark.parametrize(
    ("weight", "fault"),
    [
        (Weight("w", (2, 32), "q8_0", np.zeros(67, np.uint8)), "tensor w: .*length"),
        (Weight("w", (2, 33), "q4_0", np.zeros(36, np.uint8)), "tensor w: .*multiple of 32"),
        (Weight("w", (2, 288), "q6_k", np.zeros(420, np.uint8)), "tensor w: .*multiple of 256"),
        (matrix(np.full((2, 32), np.inf)), "infinite"),
        (vector(np.array([1, np.nan])), "tensor vector: .*not a number"),
    ],
)
def test_a_broken_weight_is_refused_by_name(weight: Weight, fault: str) -> None:
    for weights in ("int8", "stored"):
        with pytest.raises(ModelFileError, match=fault):
            NativeBackend(threads=1, weights=weights).prepare(weight)


@pytest.mark.parametrize(
    "arguments", [{"weights": "int2"}, {"group": 48}, {"kv_dtype": "f16"}, {"threads": 0}, {"kernels": "abacus"}]
)
def test_arguments_out_of_range_are_refused_by_name(arguments: dict[str, object]) -> None:
    with pytest.raises(BadInput, match=next(iter(arguments))):
        NativeBackend(**arguments)  # type: ignore[arg-type]
