"""A plain load played natively is the load played by the scheduler that serves: every time, count and sample."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway.core.step import Capabilities
from headway.engine.references import load_device, load_shape
from headway.roofline.fixed import FixedCosts
from headway.scheduling.budget import Budget
from headway.simulate import play
from headway.simulate.arrivals import Arrivals, Closed
from headway.simulate.deploy import Deployed, EngineSetup, deployed
from headway.simulate.driver import Source
from headway.simulate.plain import available, play_plain, prices_of
from headway.simulate.trail import Trail
from headway.traffic.load import Load
from headway.traffic.traces import TraceRow

pytestmark = pytest.mark.skipif(not available(), reason="needs the native module")

COSTS = FixedCosts(step=1e-3, row=1e-5, token=1e-4, kv_token=3e-7, pair=1e-8)
BASE = EngineSetup(max_model_len=60, block_size=4, prefix_cache=False)

loads = st.lists(
    st.tuples(st.sampled_from([0.0, 0.0, 1e-4, 2.5e-3, 0.04, 0.3]), st.integers(1, 50), st.integers(1, 90)),
    min_size=1, max_size=14,
)  # fmt: skip


@cache
def base() -> Deployed:
    return deployed(load_shape("llama-3.1-8b"), load_device("h100-sxm"), 1, BASE)


def small(setup: EngineSetup, blocks: int, rows: int, tokens: int, budget: int | None) -> Deployed:
    limits = Capabilities(
        block_size=4, blocks=(blocks,), windows=(None,), max_rows=rows, max_tokens_per_step=max(rows, tokens),
        max_model_len=60,
    )  # fmt: skip
    return msgspec.structs.replace(base(), setup=setup, limits=limits, budget=Budget(tokens=budget), model=COSTS)


def source_of(drawn: list[tuple[float, int, int]], concurrency: int | None, think: float, most: int | None) -> Source:
    at, rows = 0.0, []
    for after, prompt, output in drawn:
        at += after
        rows.append(TraceRow(at, prompt, output))
    return Closed(rows, concurrency, think, 0, most) if concurrency else Arrivals(rows, Load("trace"), 0, most)


def left(trail: Trail, busy: int) -> dict[str, Any]:
    """All that a trail can tell."""
    kept = {name: value for name, value in vars(trail).items() if name not in ("_detail", "records", "series")}
    records = sorted(trail.records, key=lambda record: record.index)
    return kept | {"busy": busy, "records": records, "series": trail.series.samples}


@settings(max_examples=60, deadline=None)
@example([(0.0, 3, 40)] * 6, None, 0.0, 40, 13, 5, 12, None, 0, 0)  # preempted again and again, until rows are strict
@given(
    drawn=loads, concurrency=st.none() | st.integers(1, 5), think=st.sampled_from([0.0, 0.004]),
    most=st.none() | st.integers(1, 60), blocks=st.integers(9, 40), rows=st.integers(1, 6), tokens=st.integers(3, 40),
    budget=st.none() | st.integers(1, 12), policy=st.integers(0, 1), detail=st.sampled_from([0, 60, 10_000]),
)  # fmt: skip
def test_native_is_the_scheduler(
    drawn: list[tuple[float, int, int]], concurrency: int | None, think: float, most: int | None, blocks: int,
    rows: int, tokens: int, budget: int | None, policy: int, detail: int,
) -> None:  # fmt: skip
    setup = msgspec.structs.replace(BASE, policy=("chunked", "fcfs")[policy], host_us=7.0)
    one = small(setup, blocks, rows, tokens, budget)
    told = play_plain(one, source_of(drawn, concurrency, think, most), 1, True, detail, lambda ended: None)
    assert told is not None
    assert left(*told) == left(*by_the_scheduler(one, source_of(drawn, concurrency, think, most), 1, detail))


def by_the_scheduler(one: Deployed, source: Source, replicas: int = 1, detail: int = 0) -> tuple[Trail, int]:
    return play._play(one, source, replicas, play.front_of(one, replicas, play.IN_TURN), detail, lambda ended: None)


def some(count: int) -> list[tuple[float, int, int]]:
    return [(0.004 * (number % 5), 1 + 7 * number % 50, 1 + 11 * number % 40) for number in range(count)]


def test_replicas_that_take_turns_are_played_one_after_another() -> None:
    one = small(BASE, 40, 4, 16, None)
    told = play_plain(one, source_of(some(60), None, 0.0, None), 7, True, 100, lambda ended: None)
    assert told is not None
    native_trail, trail = left(*told), left(*by_the_scheduler(one, source_of(some(60), None, 0.0, None), 7, 100))
    del native_trail["series"], trail["series"]  # of a step they show that of the first replica, not of any
    assert native_trail == trail


def test_a_prefix_cache_that_finds_nothing_changes_nothing() -> None:
    one = small(msgspec.structs.replace(BASE, prefix_cache=True), 60, 4, 16, None)
    told = play_plain(one, source_of(some(40), 3, 0.0, None), 1, True, 0, lambda ended: None)
    assert told is not None
    assert left(*told) == left(*by_the_scheduler(one, source_of(some(40), 3, 0.0, None)))


SHARED = TraceRow(0.0, 40, 9, blocks=(1, 2), block_tokens=16)


@pytest.mark.parametrize(
    ("setup", "source", "replicas", "in_turn"),
    [
        ({}, Arrivals([TraceRow(0.0, 30, 30)], Load("trace")), 2, False),
        ({}, Closed([TraceRow(0.0, 30, 30)] * 3, 2), 2, True),
        ({"policy": "fair"}, Arrivals([TraceRow(0.0, 30, 30)], Load("trace")), 1, True),
        ({"max_wait": 1.0}, Arrivals([TraceRow(0.0, 30, 30)], Load("trace")), 1, True),
        ({"prefix_cache": True}, Arrivals([SHARED], Load("trace")), 1, True),
        ({"prefix_cache": True}, Arrivals([TraceRow(0.0, 3, 40)] * 6, Load("trace"), 0, 40), 1, True),
        ({}, Arrivals([TraceRow(1.0, 3, 9), TraceRow(0.0, 3, 9)], Load("trace")), 1, True),
    ],
    ids=["routed", "closed", "policy", "bounded wait", "shared", "preempted with a prefix cache", "out of order"],
)  # fmt: skip
def test_what_is_not_plain_is_left_to_the_scheduler(
    setup: dict[str, Any], source: Source, replicas: int, in_turn: bool
) -> None:
    one = small(msgspec.structs.replace(BASE, **setup), 13, 5, 12, None)
    assert play_plain(one, source, replicas, in_turn, 0, lambda ended: None) is None


@pytest.mark.parametrize(("model", "gpus"), [("llama-3.1-8b", 1), ("llama-3.1-70b", 4), ("mixtral-8x7b", 2)])
def test_steady_steps_cost_by_the_tableful_what_each_costs(model: str, gpus: int) -> None:
    one = deployed(load_shape(model), load_device("h100-sxm"), gpus, EngineSetup(prefix_cache=False, host_us=7.3))
    ask, steady = prices_of(one)
    assert steady is not None
    for rows, first in ((1, 0), (1, 5120), (7, 70_656), (64, 81_920), (256, 1 << 20)):
        each = [ask(rows, rows, rows, keys, keys, keys) for keys in range(first, first + 300)]
        assert steady(rows, first, 300).tolist() == each


def test_native_is_the_scheduler_with_prices_by_the_tableful() -> None:
    one = deployed(load_shape("llama-3.1-8b"), load_device("h100-sxm"), 1, EngineSetup(prefix_cache=False))
    rows = [TraceRow(0.0, 1 + 97 * number % 300, 1 + 31 * number % 200) for number in range(120)]
    told = play_plain(one, Closed(rows, 3), 1, True, 0, lambda ended: None)
    assert told is not None
    assert left(*told) == left(*by_the_scheduler(one, Closed(rows, 3)))
