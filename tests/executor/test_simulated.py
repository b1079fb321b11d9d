"""The simulator: virtual time from a step-time model, reproducible tokens, and the scheduler none the wiser."""

from __future__ import annotations

import pytest

from headway.core.clock import PS_PER_SECOND, VirtualClock, to_seconds
from headway.core.request import Request, SamplingParams
from headway.core.step import Capabilities, RowInit, StepPlan, StepShape, Work
from headway.executor.protocol import Executor
from headway.roofline.fixed import FixedCosts
from headway.scheduling.scheduler import Scheduler
from tests.simulated import HashedTokens, SimulatedExecutor

LIMITS = Capabilities(
    block_size=32, blocks=(100,), windows=(None,), max_rows=4, max_tokens_per_step=64, max_model_len=999
)
ROW = RowInit("a", (1, 2, 3), 3, SamplingParams(seed=0), stop_ids=(0, 1, 2), blocks=((0,),))


def executor(clock: VirtualClock, costs: FixedCosts, host: float = 0.0) -> SimulatedExecutor:
    return SimulatedExecutor(LIMITS, clock, costs, HashedTokens(seed=1, vocab=5), host)


def test_a_step_takes_the_time_the_model_says_and_the_host_adds() -> None:
    clock = VirtualClock()
    simulated: Executor = executor(clock, FixedCosts(step=1.0, row=0.25, token=0.5, kv_token=0.125), host=0.0625)
    ticket = simulated.submit(StepPlan(0, new=(ROW,), work=(Work("a", 0, 3, logits=1, sample=True),)))
    assert clock.now() == 0, "time passes when the result is collected"
    result = simulated.collect(ticket)
    assert result.seconds.forward == 1.0 + 0.25 + 3 * 0.5 + 3 * 0.125
    assert to_seconds(clock.now()) == result.seconds.total == result.seconds.forward + 0.0625


def test_costs_see_the_shape_of_the_step() -> None:
    shape = StepShape(tokens=10, rows=3, logit_rows=1, kv_tokens=(100, 20), pairs=(0, 0))
    assert FixedCosts(step=1, row=10, token=100, kv_token=1000).predict(shape) == 1 + 30 + 1000 + 120_000


def test_tokens_are_reproducible_differ_by_row_and_position_and_are_never_stop_ids() -> None:
    source = HashedTokens(seed=1, vocab=5)
    said = [source.token(ROW, position) for position in range(200)]
    assert set(said) == {3, 4} == set(range(5)) - set(ROW.stop_ids)
    assert said == [HashedTokens(seed=1, vocab=5).token(ROW, position) for position in range(200)]
    assert said != [HashedTokens(seed=2, vocab=5).token(ROW, position) for position in range(200)]
    other = RowInit("b", ROW.tokens, 3, ROW.params, stop_ids=ROW.stop_ids, blocks=ROW.blocks)
    assert said != [source.token(other, position) for position in range(200)]


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_drafts_are_accepted_while_they_are_what_the_source_says(right: int) -> None:
    source = HashedTokens(seed=1, vocab=5)
    said = [source.token(ROW, 4 + index) for index in range(4)]
    draft = (*said[:right], *[-1] * (3 - right))
    simulated = executor(VirtualClock(), FixedCosts())
    work = Work("a", 3, 4, draft=draft, logits=4, sample=True)
    result = simulated.collect(simulated.submit(StepPlan(0, new=(ROW,), work=(work,))))
    assert result.tokens["a"] == tuple(said[: right + 1])


def test_the_scheduler_runs_on_it_and_time_to_first_token_is_what_arithmetic_says() -> None:
    clock = VirtualClock()
    simulated = executor(clock, FixedCosts(step=1.0))
    scheduler = Scheduler(LIMITS, key=b"k")
    for id in "abcde":  # four fit, the fifth waits until they are done: 3 steps
        scheduler.add(Request(id, [1] * 10, SamplingParams(seed=0), max_len=13))
    firsts = {}
    while not scheduler.idle:
        plan = scheduler.plan(clock.now())
        for output in scheduler.commit(simulated.collect(simulated.submit(plan)), clock.now()):
            firsts.setdefault(output.request.id, clock.now() // PS_PER_SECOND)
    assert firsts == {"a": 1, "b": 1, "c": 1, "d": 1, "e": 4}


def test_reset_and_close_drop_all_rows() -> None:
    simulated = executor(VirtualClock(), FixedCosts())
    plan = StepPlan(0, new=(ROW,), work=(Work("a", 0, 3, logits=1, sample=True),))
    simulated.submit(plan)
    simulated.reset()
    with pytest.raises(KeyError):
        simulated.submit(StepPlan(1, work=(Work("a", 3, 1, logits=1, sample=True),)))
    simulated.close()
    simulated.close()
    assert simulated.capabilities() is LIMITS
