"""Steps behind long contexts are predicted wrong by another factor than those behind short ones; each is sized by its
own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, repeat

import pytest

from headway.core.clock import to_ps
from headway.core.request import Request, SamplingParams
from headway.core.step import Capabilities, Seconds, StepResult
from headway.roofline.fixed import FixedCosts
from headway.scheduling.budget import Budget
from headway.scheduling.pace import kind_of
from headway.scheduling.scheduler import Scheduler

MODEL = FixedCosts(step=0.004, token=0.001)
BUDGET_MS = 40.0
LIMITS = Capabilities(
    block_size=32, blocks=(1000,), windows=(None,), max_rows=8, max_tokens_per_step=256, max_model_len=8192
)


def true_seconds(start: int, predicted: float) -> float:
    """Of a step whose chunk begins at `start`."""
    return predicted * (1.6 if start >= 1024 else 0.8)


def played(prompts: int = 30) -> tuple[Scheduler, dict[bool, list[float]]]:
    """A stream beside one long prompt after another -> milliseconds of steps with chunks, by whether they are deep."""
    scheduler = Scheduler(LIMITS, key=b"k", model=MODEL, budget=Budget(milliseconds=BUDGET_MS))
    scheduler.add(Request("stream", [1], SamplingParams(seed=0), max_len=5000))
    now, took = 0, {False: [], True: []}
    for number in range(prompts):
        id = f"long {number}"
        scheduler.add(Request(id, [number + 2] * 2500, SamplingParams(seed=0), max_len=2501))
        while id in scheduler.state.rows:
            plan = scheduler.plan(now)
            chunks = [work for work in plan.work if work.id == id and work.count > 1]
            seconds = true_seconds(chunks[0].start, plan.predicted or 0) if chunks else 0.005
            now += to_ps(seconds)
            tokens = {work.id: (5,) for work in plan.work if work.sample}
            scheduler.commit(StepResult(plan.step, tokens, seconds=Seconds(forward=seconds)), now)
            if chunks and number >= prompts // 2 and chunks[0].start + chunks[0].count < 2500:
                took[chunks[0].start >= 1024].append(1e3 * seconds)
    return scheduler, took


def test_each_depth_uses_its_budget_and_keeps_it() -> None:
    scheduler, took = played()
    for steps in took.values():
        assert 0.9 * BUDGET_MS < min(steps) <= max(steps) < 1.001 * BUDGET_MS
    slowness = scheduler.pace.slowness
    assert (slowness(kind_of(0, True)), slowness(kind_of(2000, True))) == pytest.approx((0.8, 1.6))


def test_a_depth_not_seen_yet_is_taken_to_be_as_the_one_before() -> None:
    pace = played(prompts=1)[0].pace
    assert pace.slowness(kind_of(8000, True)) == pace.slowness(kind_of(2499, True))
    assert pace.slowness(kind_of(0, False)) == 1.0


def test_the_same_results_give_the_same_steps() -> None:
    assert played(3)[1] == played(3)[1]


def stretched(slow: Iterator[float]) -> list[float]:
    """Milliseconds of steps with a chunk beside four streams, within twice what the streams take: each of them is as
    many times slower than the model says as `slow` tells next."""
    scheduler = Scheduler(LIMITS, key=b"k", model=MODEL, budget=Budget(milliseconds=1.0, least=0.01, stretch=2.0))
    for number in range(4):
        scheduler.add(Request(f"stream {number}", [number + 1], SamplingParams(seed=0), max_len=5000))
    scheduler.add(Request("long", [9] * 2500, SamplingParams(seed=0), max_len=2501))
    now, took = 0, []
    while "long" in scheduler.state.rows:
        plan = scheduler.plan(now)
        seconds = next(slow) * (plan.predicted or 0)
        now += to_ps(seconds)
        tokens = {work.id: (5,) for work in plan.work if work.sample}
        scheduler.commit(StepResult(plan.step, tokens, seconds=Seconds(forward=seconds)), now)
        if any(work.decode for work in plan.work) and any(work.count > 1 for work in plan.work):
            took.append(1e3 * seconds)
    return took


STREAMS_MS = 1e3 * (MODEL.step + 4 * MODEL.token)


@pytest.mark.parametrize("slow", [1.0, 2.5])
def test_a_stretched_step_takes_so_many_times_its_decodes_however_slow_the_machine(slow: float) -> None:
    assert max(stretched(repeat(slow))) == pytest.approx(2 * slow * STREAMS_MS, rel=0.001)


def test_where_steps_vary_nearly_all_stretched_ones_are_within_what_decodes_usually_take() -> None:
    took = stretched(cycle([1.0] * 9 + [1.25]))[64:]
    assert 1.8 * STREAMS_MS < max(took) <= 2.001 * STREAMS_MS


def test_however_much_steps_vary_prompts_get_half_of_what_they_may_stretch_to() -> None:
    took = stretched(cycle([0.3, 2.0]))
    assert len(took) < 2500 / 3  # 8 ms of decodes, and at least 4 of 1 ms a token
