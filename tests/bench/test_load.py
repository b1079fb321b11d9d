"""When requests start, and that every run ends."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.bench.client import BenchClient, Endpoint, Timeouts
from headway.bench.load import run_load
from headway.bench.workload import WorkItem
from headway.core.errors import BadInput
from headway.metrics.records import FailureKind
from headway.metrics.run import Run
from headway.traffic.load import Load, timetable
from tests.bench.mock import MockServer, Script

ITEM = WorkItem("one two three", 64)


def gaps(load: Load, count: int) -> list[float]:
    times = timetable(load, [None] * count)
    return [late - early for early, late in itertools.pairwise(times)]


def variation(values: list[float]) -> float:
    return statistics.pstdev(values) / statistics.mean(values)


@given(
    st.sampled_from(["constant", "poisson", "gamma", "ramp"]),
    st.integers(1, 200),
    st.floats(0.01, 1000),
    st.integers(0, 9),
)
def test_timetables_rise_and_keep_to_the_rate(kind: str, count: int, rate: float, seed: int) -> None:
    load = Load(kind, rate=rate, rate_end=2 * rate, burstiness=0.5, seed=seed)
    times = timetable(load, [None] * count)
    assert len(times) == count
    assert times == sorted(times) and times[0] >= 0
    assert times[-1] <= count / rate * (1 + 1e-9)
    assert times == timetable(load, [None] * count)


def test_constant_is_constant() -> None:
    assert gaps(Load("constant", rate=4), 9) == pytest.approx([0.25] * 8)


@pytest.mark.parametrize(
    ("kind", "burstiness", "expected"), [("poisson", 1.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4, 0.5)]
)
def test_variation_of_gaps_is_one_over_the_root_of_burstiness(kind: str, burstiness: float, expected: float) -> None:
    assert variation(gaps(Load(kind, rate=5, burstiness=burstiness), 20_000)) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("low", "high"), [(1.0, 9.0), (9.0, 1.0), (5.0, 5.0)])
def test_a_ramp_goes_from_one_rate_to_the_other(low: float, high: float) -> None:
    count = 20_000
    times = timetable(Load("ramp", rate=low, rate_end=high), [None] * count)
    length = 2 * count / (low + high)
    tenth = length / 10
    first = sum(at < tenth for at in times) / tenth
    last = sum(at > length - tenth for at in times) / tenth
    assert first == pytest.approx(low + (high - low) * 0.05, rel=0.1)
    assert last == pytest.approx(high - (high - low) * 0.05, rel=0.1)


def test_a_trace_brings_its_own_times_and_a_closed_loop_has_none() -> None:
    times = [0.5, 2.0]
    assert timetable(Load("trace"), times) == [0.5, 2.0]
    assert timetable(Load("closed"), times) == []


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"rate": 0}, "--rate"), ({"rate": float("nan")}, "--rate"), ({"rate": float("inf")}, "--rate"),
        ({"burstiness": -1}, "--burstiness"), ({"kind": "closed", "concurrency": 0}, "--concurrency"),
        ({"kind": "ramp", "rate_end": 0}, "--ramp-to"), ({"kind": "uniform"}, "--arrival"),
    ],
)  # fmt: skip
def test_impossible_loads_are_refused(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(BadInput) as error:
        Load(**arguments)
    assert error.value.field == field


def go(script: Script, load: Load, count: int, limits: Timeouts | None = None, warmup: int = 0) -> Run:
    async def work() -> Run:
        async with BenchClient(Endpoint.parse(server.url, "chat", "mock"), limits or Timeouts()) as client:
            return await run_load(client, load, [ITEM] * count, warmup)

    with MockServer(script) as server:
        return asyncio.run(work())


def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Ten requests 10 ms apart to an endpoint that takes half a second: all are sent long before the first answer."""
    run = go(Script(ttft=0.5, chunks=2), Load("constant", rate=100), 10)
    assert max(record.sent for record in run.records) < min(record.ended for record in run.records)
    intended = [record.intended for record in run.records]
    steps = [late - early for early, late in itertools.pairwise(intended)]
    assert steps == pytest.approx([10_000_000] * 9, abs=2)
    assert all(record.sent >= record.intended for record in run.records)


def test_a_closed_loop_keeps_so_many_in_flight_and_no_more() -> None:
    run = go(Script(ttft=0.05, chunks=2), Load("closed", concurrency=3), 9)
    spans = [(record.sent, record.ended) for record in run.records]
    together = [sum(start <= at < end for start, end in spans) for at, _ in spans]
    assert max(together) == 3
    assert all(record.completed for record in run.records)


def test_the_first_requests_are_warmup() -> None:
    run = go(Script(chunks=2), Load("closed", concurrency=2), 6, warmup=2)
    assert [record.warmup for record in run.records] == [True, True, False, False, False, False]


def test_a_run_against_a_dead_endpoint_is_stopped_and_says_so() -> None:
    run = go(Script(fault="hang"), Load("closed", concurrency=1), 50, Timeouts(stall=0.2, total=5))
    kinds = [record.failure.kind for record in run.records if record.failure]
    assert kinds[:3] == [FailureKind.HUNG] * 3
    assert set(kinds[3:]) == {FailureKind.NOT_SENT} and len(kinds) == 50
    assert "3 requests in a row" in run.gave_up


def test_an_open_loop_too() -> None:
    run = go(Script(fault="hang"), Load("constant", rate=20), 100, Timeouts(stall=0.2, total=5))
    kinds = {record.failure.kind for record in run.records if record.failure}
    assert kinds == {FailureKind.HUNG, FailureKind.NOT_SENT}
