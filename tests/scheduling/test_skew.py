"""Routing is less even than the model assumes: predictions follow the experts that steps were seen to touch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headway.core.request import Request, SamplingParams
from headway.core.step import Capabilities, Seconds, StepResult
from headway.roofline.hardware import find_hardware
from headway.roofline.step import StepTime, decode_step
from headway.roofline.work import experts_touched
from headway.scheduling.pace import MOST_SKEW
from headway.scheduling.scheduler import Scheduler
from headway.shape.catalogue import find_model

MIXTURE = find_model("qwen3-30b-a3b")  # 8 of 128 experts
ROWS = 32
LIMITS = Capabilities(
    block_size=32, blocks=(64,), windows=(None,), max_rows=ROWS, max_tokens_per_step=64, max_model_len=1000
)


def model() -> StepTime:
    return StepTime(MIXTURE, find_hardware("h100"))


def played(touched: Callable[[int], float], steps: int = 150) -> tuple[Scheduler, list[float | None]]:
    """Decode in virtual time, a step touching `touched(its tokens)` experts -> predictions of all."""
    scheduler = Scheduler(LIMITS, key=b"test", model=model())
    for number in range(ROWS):
        prompt = [number + 1]
        scheduler.add(Request(str(number), prompt, SamplingParams(seed=0), stop_ids=frozenset(), max_len=500))
    predicted, now = [], 0
    for _ in range(steps):
        plan = scheduler.plan(now)
        predicted.append(plan.predicted)
        now += 10**9
        experts = (touched(sum(work.count for work in plan.work)),)
        seconds = Seconds(forward=plan.predicted or 0.0)
        scheduler.commit(
            StepResult(plan.step, {work.id: (5,) for work in plan.work}, experts=experts, seconds=seconds), now
        )
    return scheduler, predicted


@pytest.mark.parametrize("skew", [0.0, 0.4, 1.2])
def test_predictions_come_to_what_the_measured_routing_takes(skew: float) -> None:
    scheduler, predicted = played(lambda tokens: experts_touched(128, 8, tokens, skew))
    assert scheduler.pace.skew == pytest.approx(skew, abs=0.02)
    true = StepTime(MIXTURE, find_hardware("h100"), skew=skew)
    plan = scheduler.plan(10**12)
    shape = scheduler.state.flights[-1].shape
    assert shape is not None
    assert plan.predicted == pytest.approx(true.predict(shape), rel=0.01)
    if skew > 1:
        assert plan.predicted < 0.8 * (predicted[0] or 0), "it mattered"


def test_what_is_learnt_is_bounded_and_the_same_for_the_same_results() -> None:
    scheduler, predicted = played(lambda tokens: 1.0)
    assert scheduler.pace.skew == MOST_SKEW
    assert predicted == played(lambda tokens: 1.0)[1]
    assert played(lambda tokens: 128.0)[0].pace.skew == 0


def test_steps_of_one_token_teach_nothing() -> None:
    scheduler, _ = played(lambda tokens: 40.0)
    pace, known = scheduler.pace, scheduler.pace.skew
    scheduler.plan(10**12)
    flight = scheduler.state.flights[-1]
    flight.shape = decode_step(MIXTURE, 1, 10)
    pace.count(flight, StepResult(0, experts=(8, 8)), 0, 1)
    assert known and pace.skew == pytest.approx(known)
