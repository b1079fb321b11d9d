"""The native summary of logits and the draws from it are the numpy ones, bit for bit, on every instruction set.

The native sampler looks only at tiles of the vocabulary that can matter; its specification looks at all of a row. That
their tokens are the same ones is what shows that the pruning loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.request import SamplingParams
from headway.ops.native.backend import NativeBackend
from headway.sampling.adjust import mask_rows
from headway.sampling.logits import Logits, summarise
from headway.sampling.pipeline import draw_rows
from headway.sampling.table import NOT_FINITE, NOTHING_ALLOWED, Draws, DrawTable
from tests.ops.native.harness import ONE_LAYER, blocks, kernels, matrix, random, step, unchecked
from tests.sampling.drawing import REFERENCE, row, sample

VOCABULARIES = [1, 2, 31, 32, 33, 63, 65, 1000, 1024, 3077, 40_001]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6},
    {"temperature": 30.0},
    {"temperature": 1e-30},
    {"top_k": 1},
    {"top_k": 40, "temperature": 0.7},
    {"top_k": 5000, "temperature": 2.0},
    {"top_p": 1e-9},
    {"top_p": 0.0},
    {"top_p": 0.1},
    {"top_p": 0.5, "temperature": 1.5},
    {"top_p": 0.95, "temperature": 0.8},
    {"top_p": 0.999999, "temperature": 50.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-12, "temperature": 3.0},
    {"top_p": 0.9, "min_p": 0.02},
    {"top_k": 100, "top_p": 0.7},
    {"top_k": 100, "top_p": 0.9, "min_p": 0.1, "temperature": 1.2},
]


def rows_of_every_kind(vocab: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Logits as models make them, and as nothing should."""
    rng = np.random.default_rng(seed)
    plain = rng.normal(0, 3, vocab)
    yield plain
    yield plain * 8 - 100
    yield np.round(plain)  # many ties
    yield np.zeros(vocab)  # nothing but ties
    yield np.where(rng.random(vocab) < 0.5, 0.0, -0.0)
    yield np.where((rng.random(vocab) < 0.9) & (np.arange(vocab) > 0), -np.inf, plain)  # a grammar's mask
    yield np.where(np.arange(vocab) == vocab - 1, -80.0, -np.inf)
    yield np.where(np.arange(vocab) == vocab // 2, 3e38, -3e38)
    yield plain * 1e37
    yield plain * 1e-38  # subnormal differences
    yield np.linspace(0, -90, vocab)  # across the end of exp
    yield np.linspace(-20, 0, vocab)  # the likeliest last
    yield np.where(rng.random(vocab) < 0.01, 10.0, -12.0)  # a plateau in a sea


def tables(vocab: int, seed: int = 0) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.array(list(rows_of_every_kind(vocab, seed)), np.float32)


def run(backend: NativeBackend, x: np.ndarray) -> Logits:
    """Rows of x as the result of a program."""
    table = unchecked(backend, x)
    backend.allocate(ONE_LAYER)
    return backend.compile(lambda ops: ops.logit_rows(ops.embed(table))).run(step(len(x)))


def assert_same_bits(ours: Logits, rows: np.ndarray) -> None:
    expected = summarise(rows)
    assert ours.rows.tobytes() == rows.tobytes()
    good = np.isfinite(expected.logsumexp)
    np.testing.assert_array_equal(ours.peaks[good], expected.peaks[good])
    np.testing.assert_array_equal(ours.logsumexp, expected.logsumexp)


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_summary_is_its_specification(kernel: str, vocab: int) -> None:
    rows = tables(vocab)
    bad = np.repeat(rows[:1], 3, axis=0)
    bad[0, vocab // 2], bad[1, vocab - 1], bad[2] = np.nan, np.inf, -np.inf
    rows = np.concatenate((rows, bad))
    logits = run(NativeBackend(threads=2, kernels=kernel), rows)
    assert_same_bits(logits, rows)
    assert np.isnan(logits.logsumexp[-3:-1]).all()
    assert logits.logsumexp[-1] == -np.inf
    with np.errstate(over="ignore"):
        exact = np.logaddexp.reduce(rows[:-3].astype(np.float64), axis=1)
    np.testing.assert_allclose(logits.logsumexp[:-3], exact, rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("format", ["q8_0", "q4_1", "f32", "bf16"])
@pytest.mark.parametrize("rows", [0, 1, 3, 40, 300])
def test_the_head_makes_it_along_with_its_logits(kernel: str, format: str, rows: int) -> None:
    backend = NativeBackend(threads=2, kernels=kernel)
    table = backend.prepare(matrix(random(max(rows, 1), 64)))
    head = blocks(1003, 64, format) if format.startswith("q") else matrix(random(1003, 64, seed=1), format)
    prepared = backend.prepare(head)
    backend.allocate(ONE_LAYER)
    program = backend.compile(lambda ops: ops.logits(ops.logit_rows(ops.embed(table)), prepared, 0.5, 20.0))
    logits = program.run(step(rows)) if rows else program.run(step(1, []))
    assert logits.rows.shape == (rows, 1003)
    assert logits.peaks.shape == (rows, 32)
    if rows:
        assert_same_bits(logits, logits.rows)


def drawn(backend: NativeBackend, logits: Logits, number: int, repeats: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Native and specified tokens: of every row, `repeats` draws with each of several parameters."""
    table = DrawTable(len(PARAMS))
    for slot, one in enumerate(PARAMS):
        table.set(slot, SamplingParams(seed=-3 - slot if slot % 2 else 2**62 + slot, **one), slot % 3)
    slots, rows, at = np.meshgrid(
        np.arange(len(PARAMS)), np.arange(len(logits.rows)), np.arange(repeats), indexing="ij"
    )
    draws = Draws(table, *(part.reshape(-1).astype(np.int32) for part in (slots, rows, at * 977 + number)))
    return backend.draw(logits, draws), draw_rows(logits, draws)


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_tokens_are_the_specified_ones(kernel: str, vocab: int) -> None:
    logits = summarise(tables(vocab, seed=vocab))
    ours, specified = drawn(NativeBackend(threads=2, kernels=kernel), logits, 5, 2 if vocab > 4000 else 6)
    np.testing.assert_array_equal(ours, specified)
    assert ours.min() >= 0


BACKEND = NativeBackend(threads=1) if kernels()[0] in ("avx512_bf16", "avx512", "avx2", "scalar") else None


@pytest.mark.skipif(BACKEND is None, reason="the native kernels are not built")
@given(st.data())
def test_pruned_equals_whole_for_any_parameters(data: st.DataObject) -> None:
    """Hypothesis looks for a row, a key and parameters where looking at less gives another token."""
    assert BACKEND is not None
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    vocab = data.draw(st.integers(1, 700))
    shape = data.draw(st.sampled_from(["normal", "ties", "steep", "masked", "flat"]))
    logits = rng.normal(0, data.draw(st.floats(0.1, 12)), (4, vocab))
    logits = {
        "normal": logits,
        "ties": np.round(logits),
        "steep": np.sort(logits * 5, axis=1),
        "masked": np.where(rng.random((4, vocab)) < 0.8, -np.inf, logits),
        "flat": logits * 1e-4,
    }[shape]
    logits[:, rng.integers(vocab)] = 0.0  # something is allowed
    table = DrawTable(1)
    table.set(
        0,
        SamplingParams(
            seed=data.draw(st.integers(-(2**63) + 1, 2**63 - 1)),
            temperature=data.draw(st.one_of(st.sampled_from([0.0, 1.0, 1e-300]), st.floats(0.05, 20))),
            top_k=data.draw(st.sampled_from([0, 0, 0, 1, 2, 7, 50, 400, 2**31 - 1])),
            top_p=data.draw(st.one_of(st.just(1.0), st.floats(1e-12, 1.0, exclude_min=True))),
            min_p=data.draw(st.sampled_from([0.0, 0.0, 1e-40, 1e-6, 0.1, 0.999, 1.0])),
        ),
        data.draw(st.integers(0, 127)),
    )
    at = np.repeat(np.arange(4, dtype=np.int32), 3)
    draws = Draws(table, np.zeros(12, np.int32), at, rng.integers(0, 2**31 - 1, 12).astype(np.int32))
    summary = summarise(logits.astype(np.float32))
    np.testing.assert_array_equal(BACKEND.draw(summary, draws), draw_rows(summary, draws))


@pytest.mark.parametrize("kernel", kernels())
def test_rows_that_nothing_can_be_drawn_from_say_why_and_spare_their_neighbours(kernel: str) -> None:
    backend = NativeBackend(threads=2, kernels=kernel)
    good = tables(500)[:1].repeat(6, axis=0)
    rows = good.copy()
    rows[1, 77], rows[2, 499], rows[3] = np.nan, np.inf, -np.inf
    rows[4, 3] = -np.inf
    ours, specified = drawn(backend, summarise(rows), 1)
    np.testing.assert_array_equal(ours, specified)
    by_row = ours.reshape(len(PARAMS), 6, -1)
    assert (by_row[:, 1:3] == NOT_FINITE).all()
    assert (by_row[:, 3] == NOTHING_ALLOWED).all()
    fine = drawn(backend, summarise(good), 1)[0].reshape(len(PARAMS), 6, -1)
    np.testing.assert_array_equal(by_row[:, [0, 5]], fine[:, [0, 5]])


@pytest.mark.parametrize("kernel", kernels())
def test_adjusted_rows_draw_alike(kernel: str) -> None:
    """Penalties, biases and masks are written into the rows; afterwards the rows and their peaks are as before."""
    backend = NativeBackend(threads=2, kernels=kernel)
    logits = tables(3077)[:4]
    fields: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "tokens": tuple(range(0, 3077, 3)), "prompt_len": 40},
        {"logit_bias": ((5, 3.0), (3076, 90.0)), "top_p": 0.9},
        {"min_tokens": 9, "stop": tuple(range(1500)), "temperature": 0.0},
        {"frequency_penalty": -1.0, "tokens": (1, 2, 3, 3, 3), "prompt_len": 1, "logprobs": 2},
    ]
    results = [sample(logits.copy(), [row(**one) for one in fields], [2] * 4, ops) for ops in (backend, REFERENCE)]
    assert results[0] == results[1]
    assert results[0].tokens[1] == 3076
    assert results[0].tokens[2] >= 1500


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_masked_rows_are_the_specified_ones(kernel: str, vocab: int) -> None:
    backend, rows = NativeBackend(threads=2, kernels=kernel), tables(vocab)
    numbers = [3, 0, 2]
    words = -(-vocab // 32) - (vocab > 64)  # one may name fewer tokens than there are
    masks = np.random.default_rng(0).integers(0, 2**32, (3, words), np.uint32)
    masks[1], masks[2] = 0, 2**32 - 1
    made = run(backend, rows)
    expected = Logits(made.rows.copy(), made.peaks.copy(), made.logsumexp)
    before = mask_rows(expected, numbers, masks)
    logits = run(backend, rows)
    undo = backend.mask(logits, numbers, masks, True)
    np.testing.assert_array_equal(logits.rows, expected.rows)
    np.testing.assert_array_equal(logits.peaks, expected.peaks)
    assert undo is not None
    undo.undo(logits)
    before.undo(expected)
    np.testing.assert_array_equal(logits.rows, rows)
    np.testing.assert_array_equal(logits.peaks, expected.peaks)
    assert backend.mask(logits, numbers, masks, False) is None
    with pytest.raises(ValueError, match="row"):
        backend.mask(logits, [len(rows)], masks[:1], False)


def test_arrays_that_do_not_fit_are_refused() -> None:
    if BACKEND is None:
        pytest.skip("the native kernels are not built")
    table = DrawTable(1)
    table.set(0, SamplingParams(seed=0), 0)
    zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    logits = summarise(tables(64)[:1])
    for slots, rows in ((zero, one), (one, zero), (-one, zero)):
        with pytest.raises(ValueError, match="a draw is of no row"):
            BACKEND.draw(logits, Draws(table, slots, rows, zero))
    with pytest.raises(ValueError, match="do not fit"):
        BACKEND.draw(Logits(logits.rows, logits.peaks[:, :1], logits.logsumexp), Draws(table, zero, zero, zero))
