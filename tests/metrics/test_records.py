"""Metrics of one request, from its chunks."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.metrics.records import Failure, FailureKind, RequestRecord, spread
from tests.bench.streams import record


def per_token(r: RequestRecord) -> list[float]:
    return [gap for gap, tokens in r.token_gaps_ms() for _ in range(tokens)]


def test_the_known_stream() -> None:
    """200 ms to the first token, then 100 chunks of three tokens every 30 ms."""
    r = record()
    assert r.ttft_ms == pytest.approx(200)
    assert r.tpot_ms == pytest.approx(10)
    assert r.e2e_ms == pytest.approx(3200)
    assert r.e2e_done_ms == pytest.approx(3206)
    assert r.chunk_gaps_ms() == pytest.approx([30.0] * 100)
    assert per_token(r) == pytest.approx([10.0] * 300)


@given(
    first=st.floats(0.1, 1e5),
    gap=st.floats(0, 1e3),
    chunks=st.integers(2, 60),
    extra=st.integers(0, 100),
    late=st.floats(0, 50),
)
def test_end_to_end_is_ttft_plus_the_rest_of_the_tokens(
    first: float, gap: float, chunks: int, extra: int, late: float
) -> None:
    r = record(first, gap, chunks, chunks + extra, late_ms=late)
    assert r.ttft_ms is not None and r.tpot_ms is not None and r.output_tokens is not None
    assert r.e2e_ms == pytest.approx(r.ttft_ms + (r.output_tokens - 1) * r.tpot_ms, rel=1e-9, abs=1e-6)


@given(st.integers(2, 60), st.integers(0, 200), st.floats(0, 100))
def test_token_gaps_are_as_many_as_the_tokens_and_sum_to_the_stream(chunks: int, extra: int, gap: float) -> None:
    r = record(10, gap, chunks, chunks + extra)
    gaps = per_token(r)
    assert len(gaps) == chunks + extra - 1
    assert sum(gaps) == pytest.approx(gap * (chunks - 1), abs=1e-3)


def test_latencies_count_from_the_intended_start() -> None:
    assert record(first_ms=200, late_ms=150).ttft_ms == pytest.approx(200)


def test_a_role_chunk_is_not_a_token_and_reasoning_is_not_the_answer() -> None:
    r = record(role_ms=20, reasoning=10)
    assert r.ttft_ms == pytest.approx(200)
    assert r.ttfa_ms == pytest.approx(200 + 10 * 30)


def test_one_token_has_no_tpot() -> None:
    r = record(chunks=1, tokens=1)
    assert r.tpot_ms is None
    assert r.e2e_ms == r.ttft_ms


@pytest.mark.parametrize("untold", [True, False])
def test_without_a_trusted_count_there_is_no_tpot_but_the_rest_stays(untold: bool) -> None:
    r = record(tokens=None if untold else 7)
    if not untold:
        r.failure = Failure(FailureKind.WRONG_USAGE, "a lie")
    assert r.tpot_ms is None
    assert r.token_gaps_ms() == []
    assert r.ttft_ms == pytest.approx(200)
    assert len(r.chunk_gaps_ms()) == 100


def test_told_tokens_per_chunk_are_used() -> None:
    r = record(chunks=11, tokens=44, told=4)
    assert per_token(r) == pytest.approx([7.5] * 40)


@given(st.integers(0, 1000), st.integers(1, 50))
def test_spread_keeps_the_sum_and_is_even(total: int, parts: int) -> None:
    found = spread(total, parts)
    assert sum(found) == total
    assert max(found) - min(found) <= 1


def test_tokens_of_the_first_chunk_are_not_in_the_time_per_output_token() -> None:
    """40 tokens come at once and are told, then 60 every 10 ms: 600 ms for 60."""
    bundled = record(gap_ms=10.0, chunks=61, tokens=100, told=1)
    bundled.chunks[0] = msgspec.structs.replace(bundled.chunks[0], tokens=40)
    assert bundled.tpot_ms == pytest.approx(10.0)
    at_once = record(chunks=1, tokens=100, told=100)
    assert at_once.tpot_ms is None


@pytest.mark.parametrize(
    ("first", "then", "told"),
    [(40, 1, True), (1, 1, True), (1, 10, True), (100, 0, True), (1, 1, False)],
    ids=["many first", "one by one", "ten by ten", "all at once", "not told"],
)
def test_t2_049_the_time_of_a_token_does_not_depend_on_how_they_are_bundled(first: int, then: int, told: bool) -> None:
    """Tokens take 10 ms each; a chunk comes when its last token is there."""
    chunks = 1 + (100 - first) // then if then else 1
    made = record(first_ms=500, gap_ms=10 * then, chunks=chunks, tokens=first + then * (chunks - 1))
    if told:
        sizes = [first, *[then] * (chunks - 1)]
        made.chunks[:chunks] = [
            msgspec.structs.replace(chunk, tokens=n) for chunk, n in zip(made.chunks, sizes, strict=False)
        ]
    assert made.tpot_ms == (pytest.approx(10) if then else None)
