"""The first steps of an engine: what they measure, what follows from it, and that they leave nothing behind."""

from __future__ import annotations

import pytest

from headway.core.clock import VirtualClock
from headway.core.request import SamplingParams
from headway.core.step import Capabilities, StepShape
from headway.engine.warmup import measure_steps, pace, settle
from headway.roofline.fixed import FixedCosts
from headway.scheduling.shape import ShapeBuilder
from tests.engine.tiny import TinyModel, complete, prompts, tokens_of
from tests.simulated import HashedTokens, SimulatedExecutor

LIMITS = Capabilities(
    block_size=32, blocks=(100, 40), windows=(None, 64), max_rows=8, max_tokens_per_step=256, max_model_len=3000
)
COSTS = FixedCosts(step=0.01, token=0.001, kv_token=2e-6, pair=1e-7)


def executor(costs: FixedCosts = COSTS, limits: Capabilities = LIMITS) -> SimulatedExecutor:
    return SimulatedExecutor(limits, VirtualClock(), costs, HashedTokens(0, 10))


@pytest.mark.parametrize(
    "costs",
    [COSTS, FixedCosts(step=0.3, token=0.02), FixedCosts(step=0.001), FixedCosts(step=0.01, token=1e-3, logit=5e-4)],
)
def test_the_costs_of_steps_are_found_again(costs: FixedCosts) -> None:
    """In one KV group without a window, which these kinds of cost describe exactly."""
    limits = Capabilities(
        block_size=32, blocks=(100,), windows=(None,), max_rows=8, max_tokens_per_step=256, max_model_len=3000
    )
    found = measure_steps(executor(costs, limits))
    assert found.token == pytest.approx(costs.token, rel=0.1, abs=1e-5)
    assert found.step == pytest.approx(costs.step, rel=0.02)
    assert found.logit == pytest.approx(costs.logit, rel=0.1, abs=2e-5)
    assert (found.kv_token, found.pair) == pytest.approx((costs.kv_token, costs.pair), rel=0.1, abs=1e-9)


def test_where_drafts_are_verified_steps_of_a_few_are_measured_too() -> None:
    """A machine that takes four rows at a time: a line through one and 32 tokens would say 8 ms for the fifth."""

    class ByFours(FixedCosts, frozen=True):
        def predict(self, shape: StepShape) -> float:
            return 0.001 * -(-shape.tokens // 4)

    limits = Capabilities(
        block_size=32, blocks=(100,), windows=(None,), max_rows=8, max_tokens_per_step=256, max_model_len=3000,
        max_drafts=64,
    )  # fmt: skip
    costs = measure_steps(executor(ByFours(), limits))
    for tokens, seconds in ((1, 0.001), (4, 0.001), (5, 0.002), (8, 0.002), (16, 0.004), (32, 0.008)):
        builder = ShapeBuilder((None,))
        builder.add(0, tokens, tokens)
        assert costs.predict(builder.build()) == pytest.approx(seconds, rel=0.02, abs=2e-5)
    assert measure_steps(executor(ByFours())).bends == ()


@pytest.mark.parametrize("context", [2, 40, 100])
def test_a_short_context_is_no_obstacle(context: int) -> None:
    limits = Capabilities(
        block_size=8, blocks=(20,), windows=(None,), max_rows=2, max_tokens_per_step=4, max_model_len=context
    )
    assert measure_steps(executor(COSTS, limits)).step > 0


def test_the_budget_is_three_decode_steps_unless_somebody_says_otherwise() -> None:
    pacing = pace(executor(), 256, None, None, measured=True)
    assert pacing.budget.milliseconds == pytest.approx(33, rel=0.02) and pacing.budget.tokens == 256
    assert pacing.text.startswith("up to 33") and "a decode step took 11" in pacing.text
    assert pace(executor(FixedCosts(step=0.001)), 256, None, None, measured=True).budget.milliseconds == 20
    assert pace(executor(), 256, 70.0, None, measured=False).budget.milliseconds == 70
    assert pace(executor(), 256, None, None, measured=False).budget.milliseconds is None
    assert pace(executor(), 256, None, FixedCosts(step=1.0), measured=True).model == FixedCosts(step=1.0)


def test_a_server_writes_its_cache_and_runs_its_largest_step_before_anybody_asks() -> None:
    model = TinyModel()
    params = SamplingParams(temperature=0, max_tokens=6, seed=0)
    cold = complete(model.loop(), prompts(5), params)
    loop = model.loop()
    sizes: list[int] = []
    submit = loop.executor.submit
    loop.executor.submit = lambda plan: sizes.append(sum(work.count for work in plan.work)) or submit(plan)  # type: ignore[method-assign]
    pacing = pace(loop.executor, 256, 5.0, FixedCosts(step=0.001, token=0.0001), measured=True)
    assert list(settle(loop.executor, pacing, seconds=60.0))[-1] == 400
    assert max(sizes) == 190, "(20 ms - 1) / 0.1, the longest step when nobody decodes"
    warm = complete(loop, prompts(5), params)
    assert {id: tokens_of(deltas) for id, deltas in warm.items()} == {id: tokens_of(d) for id, d in cold.items()}
    assert list(settle(loop.executor, pacing, seconds=0.0)) == [0]


def test_a_real_executor_answers_as_if_it_had_never_been_warmed_up() -> None:
    model = TinyModel()
    params = SamplingParams(temperature=0, max_tokens=6, seed=0)
    cold = complete(model.loop(), prompts(5), params)
    loop = model.loop()
    assert measure_steps(loop.executor).step > 0
    warm = complete(loop, prompts(5), params)
    assert {id: tokens_of(deltas) for id, deltas in warm.items()} == {id: tokens_of(d) for id, d in cold.items()}
