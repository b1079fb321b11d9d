"""An executor that breaks in mid-step: the step's rows end, everyone else goes on as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headway.core.request import SamplingParams
from headway.core.step import StepPlan
from headway.engine.loop import EngineLoop
from headway.engine.messages import Delta, Submit
from headway.executor.model import ModelExecutor
from headway.scheduling.invariants import check
from headway.scheduling.policies import policy_named
from tests.engine.tiny import TinyModel, complete, drain, prompts, tokens_of

GREEDY = SamplingParams(temperature=0, max_tokens=12, seed=1)
SEEDED = SamplingParams(temperature=0.9, max_tokens=12, seed=5, repetition_penalty=1.3)


def before_anything(executor: ModelExecutor, plan: StepPlan) -> None:
    """Not even the rows that are gone were dropped."""


def half_way(executor: ModelExecutor, plan: StepPlan) -> None:
    executor._rows.apply(plan)


def when_all_was_done(executor: ModelExecutor, plan: StepPlan) -> None:
    executor._done[plan.step] = executor._run(plan)


MOMENTS = [before_anything, half_way, when_all_was_done]


def break_at(loop: EngineLoop, step: int, moment: Callable[[ModelExecutor, StepPlan], None]) -> None:
    executor = loop.executor
    assert isinstance(executor, ModelExecutor)
    real = executor.submit

    def submit(plan: StepPlan) -> int:
        if plan.step == step:
            moment(executor, plan)
            raise OSError("the device is gone")
        return real(plan)

    executor.submit = submit  # type: ignore[method-assign]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("params", [GREEDY, SEEDED])
def test_rows_outside_of_the_broken_step_go_on_unchanged(
    moment: Callable[[ModelExecutor, StepPlan], None], params: SamplingParams
) -> None:
    """Under prefill-first the running rows pause while a new prompt is computed: in the step that breaks."""
    model = TinyModel()
    first, second = prompts(3)[:2], prompts(3)[2:]
    calm = complete(model.loop(), first, params)
    loop = model.loop(policy=policy_named("prefill-first"))
    for number, tokens in enumerate(first):
        assert loop.submit(Submit(id=str(number), tokens=tokens, params=params)) is None
    deltas = [delta for _ in range(4) for delta in loop.turn()]
    break_at(loop, 4, moment)
    loop.submit(Submit(id="broken", tokens=second[0], params=params))
    deltas += loop.turn()
    assert [(delta.id, delta.finish and delta.finish.reason) for delta in deltas[-1:]] == [("broken", "error")]
    check(loop.scheduler)
    assert loop.executor._rows.by_id == {} and loop.executor._done == {}  # type: ignore[attr-defined]
    deltas += drain(loop)
    for id, expected in calm.items():
        assert tokens_of([delta for delta in deltas if delta.id == id]) == tokens_of(expected)
    assert loop.executor._rows.by_id == {}  # type: ignore[attr-defined]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("step", range(8))
def test_no_row_outlives_the_break_and_the_cache_is_whole(
    step: int, moment: Callable[[ModelExecutor, StepPlan], None]
) -> None:
    """Few blocks, so that the step that breaks may hold preempted, finished and new rows; then the same again."""
    model = TinyModel()
    params = SamplingParams(temperature=0, max_tokens=6, n=2, seed=1)
    calm = complete(model.loop(), prompts(6), params)
    loop = model.loop(blocks=30, max_rows=3)
    break_at(loop, step, moment)
    errors = [delta for deltas in complete(loop, prompts(6), params).values() for delta in deltas if _failed(delta)]
    assert errors and all("OSError" in str(delta.finish and delta.finish.matched) for delta in errors)
    assert loop.executor._rows.by_id == {} and not any(loop.executor._sampler._states)  # type: ignore[attr-defined]
    check(loop.scheduler)
    for id, deltas in complete(loop, prompts(6), params).items():
        for choice in (0, 1):
            mine, theirs = (tokens_of([one for one in some if one.choice == choice]) for some in (deltas, calm[id]))
            assert mine == theirs


def _failed(delta: Delta) -> bool:
    return delta.finish is not None and delta.finish.reason == "error"
