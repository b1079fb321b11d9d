"""Linear layers, gated MLP and logits of every instruction set against their formulas; and bit by bit against
themselves with other numbers of rows and threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headway.ops.activations import ACTIVATIONS
from headway.ops.native.backend import NativeBackend
from headway.ops.weight import Weight
from headway.shape.formats import FORMATS
from tests.ops.native.harness import FACTORS, ONE_LAYER, blocks, kernels, matrix, quantised, random, run, step, vector

INTEGERS = [
    "q8_0",
    "q4_0",
    "q4_1",
    "q5_1",
    "q2_k",
    "q3_k",
    "q6_k",
]  # every width, zero and minimum, groups of 16 and 32
FLOATS = ["f32", "f16", "bf16"]


def whole_blocks(format: str, inputs: int) -> int:
    """`inputs`, or the next size that the format allows."""
    return -(-inputs // FORMATS[format].numbers) * FORMATS[format].numbers


def weight(format: str, out: int, inputs: int, seed: int = 1) -> Weight:
    if format in INTEGERS:
        return blocks(out, inputs, format, seed)
    return matrix(random(out, inputs, seed=seed), format)


def met(backend: NativeBackend, x: np.ndarray, w: Weight) -> np.ndarray:
    """The activations as the kernels see them."""
    if w.format in INTEGERS:
        return quantised(x, 16 if w.format in ("q2_k", "q3_k", "q6_k") else 32)
    rounds = w.format == "bf16" and backend.kernels == "avx512_bf16"
    return matrix(x, "bf16").dequantise() if rounds else x.astype(np.float64)


def close(got: np.ndarray, x: np.ndarray, w: np.ndarray) -> None:
    """Within float32 rounding of sums of this size."""
    bound = np.abs(x).astype(np.float64) @ np.abs(w.T).astype(np.float64)
    assert np.isfinite(got).all()
    assert (np.abs(got - x.astype(np.float64) @ w.T.astype(np.float64)) <= 3e-6 * bound + 1e-30).all()


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("format", INTEGERS + FLOATS)
@pytest.mark.parametrize(("out", "inputs"), [(1, 32), (33, 64), (70, 576), (160, 416)])
def test_linear_equals_its_formula(kernel: str, format: str, out: int, inputs: int) -> None:
    backend, inputs = NativeBackend(threads=2, kernels=kernel), whole_blocks(format, inputs)
    w = weight(format, out, inputs)
    x = random(14, inputs) * 10.0 ** np.random.default_rng(2).integers(-3, 3, (14, 1)).astype(np.float32)
    prepared = backend.prepare(w)
    close(run(backend, x, lambda ops, h: ops.linear(h, prepared)), met(backend, x, w), prepared.unpack())


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("format", FLOATS)
@pytest.mark.parametrize("inputs", [1, 7, 33])
def test_odd_widths(kernel: str, format: str, inputs: int) -> None:
    backend = NativeBackend(threads=1, kernels=kernel)
    w, x = weight(format, 5, inputs), random(3, inputs)
    prepared = backend.prepare(w)
    close(run(backend, x, lambda ops, h: ops.linear(h, prepared)), met(backend, x, w), prepared.unpack())


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize(
    ("kind", "group"),
    [("int8", 128), ("int8", 64), ("int8", 16), ("int4", 16), ("int4", 32), ("int4", 64), ("int4", 128)],
)
@pytest.mark.parametrize("inputs", [40, 576])
def test_weights_quantised_at_load(kernel: str, kind: str, group: int, inputs: int) -> None:
    backend = NativeBackend(threads=2, kernels=kernel, weights=kind, group=group)
    prepared, x = backend.prepare(matrix(random(70, inputs, seed=1))), random(9, inputs)
    close(run(backend, x, lambda ops, h: ops.linear(h, prepared)), quantised(x, group), prepared.unpack())


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("format", INTEGERS + FLOATS)
def test_extremes(kernel: str, format: str) -> None:
    """Zeros, one spike among zeros, values near the ends of float32, alternating signs at full scale."""
    backend = NativeBackend(threads=1, kernels=kernel)
    inputs = whole_blocks(format, 128)
    w = weight(format, 40, inputs)
    x = np.zeros((6, inputs), np.float32)
    x[1, 77] = 3e4
    x[2] = 1e-38
    x[3] = 1e30
    x[4] = np.where(np.arange(inputs) % 2, -127.0, 127.0)
    x[5] = np.linspace(-1, 1, inputs)
    prepared = backend.prepare(w)
    got = run(backend, x, lambda ops, h: ops.linear(h, prepared))
    rows = [0, 1, 3, 4, 5]
    close(got[rows], met(backend, x, w)[rows], prepared.unpack())
    assert (np.abs(got[2]) <= 1e-30).all()


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("format", INTEGERS + FLOATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_says_so_and_spares_its_neighbours(kernel: str, format: str, bad: float) -> None:
    backend = NativeBackend(threads=1, kernels=kernel)
    inputs = whole_blocks(format, 96)
    prepared, x = backend.prepare(weight(format, 33, inputs)), random(8, inputs)
    fine = run(backend, x, lambda ops, h: ops.linear(h, prepared))
    x[4, 50] = bad
    got = run(backend, x, lambda ops, h: ops.linear(h, prepared))
    assert not np.isfinite(got[4]).any()
    np.testing.assert_array_equal(np.delete(got, 4, 0), np.delete(fine, 4, 0))


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("format", ["q8_0", "q4_0", "q6_k"])
def test_a_group_without_scale_adds_nothing_whatever_its_codes_are(kernel: str, format: str) -> None:
    backend, inputs = NativeBackend(threads=1, kernels=kernel), whole_blocks(format, 64)
    w = weight(format, 33, inputs)
    size, byte = FORMATS[format].bytes, FACTORS.get(format, (0,))[0]
    w.data.reshape(-1, size)[:, byte : byte + 2] = 0
    prepared, x = backend.prepare(w), random(4, inputs) * np.array([[1e-30], [1], [3e4], [1e30]], np.float32)
    np.testing.assert_array_equal(run(backend, x, lambda ops, h: ops.linear(h, prepared)), 0)


def block(backend: NativeBackend, format: str) -> Any:
    """Everything of a layer that is row by row: norm, linear with bias and residual, gated MLP."""
    width, inner = whole_blocks(format, 96), whole_blocks(format, 288)
    rows = [weight(format, width, width, seed) for seed in range(2)]
    up = [weight(format, inner, width, seed) for seed in range(2)]
    prepared = [backend.prepare(w) for w in (*rows, *up, weight(format, width, inner))]
    scale, bias = (backend.prepare(vector(random(width, seed=seed))) for seed in (3, 4))

    def family(ops: Any, x: Any) -> Any:
        h = ops.rms_norm(x, scale, 1e-5)
        a = ops.linear(h, prepared[0], bias)
        b = ops.linear(h, prepared[1], residual=x)
        x = ops.linear(a, prepared[1], residual=b)
        return ops.gated_mlp(ops.rms_norm(x, scale, 1e-5), *prepared[2:], "silu", residual=x)

    return family


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("format", INTEGERS + FLOATS)
def test_a_row_is_the_same_bits_alone_in_any_batch_and_on_any_number_of_threads(kernel: str, format: str) -> None:
    x = random(300, whole_blocks(format, 96))
    backend = NativeBackend(threads=3, kernels=kernel)
    family = block(backend, format)
    together = run(backend, x, family)
    assert np.isfinite(together).all()
    for rows in ([0], [299], range(5), range(7, 20), range(50, 300)):
        np.testing.assert_array_equal(run(backend, x, family, rows), together[list(rows)])
    alone = NativeBackend(threads=1, kernels=kernel)
    np.testing.assert_array_equal(run(alone, x, block(alone, format)), together)


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu"])
def test_gated_mlp(kernel: str, activation: str) -> None:
    backend = NativeBackend(threads=2, kernels=kernel)
    gate, up, down = random(100, 48, seed=1), random(100, 48, seed=2), random(48, 100, seed=3)
    x = random(9, 48) * np.float32(3)
    prepared = [backend.prepare(matrix(w)) for w in (gate, up, down)]
    got = run(backend, x, lambda ops, h: ops.gated_mlp(h, *prepared, activation, residual=h))
    hidden = ACTIVATIONS[activation]((x @ gate.T).astype(np.float64)) * (x @ up.T)
    np.testing.assert_allclose(got, hidden @ down.T + x, rtol=1e-4, atol=2e-3)
    biases = random(100, seed=4), random(100, seed=5), random(48, seed=6)
    given = [backend.prepare(vector(bias)) for bias in biases]
    got = run(backend, x, lambda ops, h: ops.gated_mlp(h, *prepared, activation, None, *given))
    hidden = ACTIVATIONS[activation]((x @ gate.T + biases[0]).astype(np.float64)) * (x @ up.T + biases[1])
    np.testing.assert_allclose(got, hidden @ down.T + biases[2], rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu", "relu2"])
def test_an_activation_alone(kernel: str, activation: str) -> None:
    backend, x = NativeBackend(threads=2, kernels=kernel), random(9, 133) * np.float32(4)
    with np.errstate(all="ignore"):
        expected = ACTIVATIONS[activation](x)
    got = run(backend, x, lambda ops, h: ops.activate(h, activation))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kernel", kernels())
def test_layer_norm_of_rows_and_of_their_parts(kernel: str) -> None:
    backend, x = NativeBackend(threads=2, kernels=kernel), random(7, 60) * np.float32(5) + np.float32(3)
    weight, bias = random(60, seed=1), random(60, seed=2)
    for parts, w, b in ((1, weight, bias), (1, weight, None), (4, weight, None), (4, weight[:15], bias[:15])):
        given = [None if v is None else backend.prepare(vector(v)) for v in (w, b)]
        got = run(backend, x, lambda ops, h, parts=parts, given=given: ops.layer_norm(h, *given, 1e-3, parts))
        cut = x.astype(np.float64).reshape(7, parts, -1)
        cut = (cut - cut.mean(-1, keepdims=True)) / np.sqrt(cut.var(-1, keepdims=True) + 1e-3)
        expected = cut * w.reshape(-1, cut.shape[-1]) + (0 if b is None else b.reshape(-1, cut.shape[-1]))
        np.testing.assert_allclose(got, expected.reshape(7, 60), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", kernels())
def test_rms_norm(kernel: str) -> None:
    backend = NativeBackend(threads=2, kernels=kernel)
    for width in (1, 15, 96, 577):
        x, weight = random(4, width) * np.float32(7), random(width, seed=5)
        prepared = backend.prepare(vector(weight))
        got = run(backend, x, lambda ops, h, w=prepared: ops.rms_norm(h, w, 1e-5))
        wide = x.astype(np.float64)
        np.testing.assert_allclose(got, wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight, rtol=1e-5)
        added = run(backend, x, lambda ops, h, w=prepared: ops.rms_norm(h, w, 1e-5, residual=h))
        np.testing.assert_array_equal(added, got + x)


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("width", [1, 15, 64, 130])
def test_a_norm_of_each_head_is_the_norm_of_rows_as_wide_as_a_head(kernel: str, width: int) -> None:
    backend = NativeBackend(threads=2, kernels=kernel)
    heads = random(20, width) * np.float32(7)
    prepared = backend.prepare(vector(random(width, seed=5)))
    alone = run(backend, heads, lambda ops, h: ops.rms_norm(h, prepared, 1e-5))
    together = run(backend, heads.reshape(4, -1), lambda ops, h: ops.rms_norm(h, prepared, 1e-5))
    np.testing.assert_array_equal(together, alone.reshape(4, -1))


def test_embeddings_are_scaled() -> None:
    backend, x = NativeBackend(threads=1), random(5, 40)
    table = backend.prepare(matrix(x))
    backend.allocate(ONE_LAYER)
    program = backend.compile(lambda ops: ops.logit_rows(ops.embed(table, 7.5)))
    np.testing.assert_array_equal(program.run(step(5)).rows, x * np.float32(7.5))


def test_a_norm_that_does_not_fit_is_refused() -> None:
    backend = NativeBackend(threads=1)
    prepared = backend.prepare(vector(random(7)))
    with pytest.raises(ValueError, match="rms_norm"):
        run(backend, random(4, 8), lambda ops, h: ops.rms_norm(h, prepared, 1e-5))


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 0.0), (0.25, 0.0), (1.0, 30.0), (0.5, 2.0)])
def test_logits(kernel: str, scale: float, softcap: float) -> None:
    backend = NativeBackend(threads=2, kernels=kernel)
    head, x = random(70, 48, seed=1), random(5, 48)
    prepared, table = backend.prepare(matrix(head)), backend.prepare(matrix(x))
    backend.allocate(ONE_LAYER)
    program = backend.compile(lambda ops: ops.logits(ops.logit_rows(ops.embed(table)), prepared, scale, softcap))
    want = (x.astype(np.float64) @ head.T) * scale
    want = softcap * np.tanh(want / softcap) if softcap else want
    np.testing.assert_allclose(program.run(step(5, [4, 0, 4])).rows, want[[4, 0, 4]], rtol=1e-5, atol=1e-5)
    assert program.run(step(3, [])).rows.shape == (0, 70)
