"""Receipts and idle time add up to the wall time, to the picosecond, whatever happens to requests."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.clock import VirtualClock, to_ps
from headway.core.events import EventLog, StepDone
from headway.core.receipts import Receipt, Receipts
from headway.core.request import Request, SamplingParams
from headway.core.step import Capabilities, Seconds, StepShape
from headway.engine.references import load_shape
from headway.roofline.fixed import FixedCosts
from headway.roofline.hardware import find_hardware
from headway.roofline.step import StepTime
from headway.scheduling.budget import Budget
from headway.scheduling.scheduler import Scheduler
from tests.simulated import HashedTokens, SimulatedExecutor

COSTS = FixedCosts(step=0.02, row=0.001, token=0.002, kv_token=1e-6, pair=1e-8)


class Engine:
    """A scheduler on a simulated executor, whose events go to `Receipts`."""

    def __init__(self, blocks: int = 60, in_flight: int = 1, budget: int = 48) -> None:
        limits = Capabilities(
            block_size=4, blocks=(blocks,), windows=(None,), max_rows=4, max_tokens_per_step=64, max_model_len=200,
            max_in_flight=in_flight,
        )  # fmt: skip
        self.clock = VirtualClock()
        self.receipts = Receipts(COSTS.parts, limits.windows)
        self.scheduler = Scheduler(
            limits, key=b"k", budget=Budget(tokens=budget), model=COSTS, log=EventLog(self.receipts)
        )
        self.executor = SimulatedExecutor(limits, self.clock, COSTS, HashedTokens(1, 1000))
        self.plans: list[int] = []

    def add(self, id: str, prompt: int, answer: int, n: int = 1, head: int = 0) -> None:
        tokens = [0] * min(head, prompt) + [hash((id, i)) % 999 + 1 for i in range(prompt - min(head, prompt))]
        params = SamplingParams(seed=0, n=n)
        self.scheduler.add(Request(id, tokens, params, max_len=prompt + answer, arrival=self.clock.now()))

    def turn(self) -> bool:
        while len(self.plans) < self.executor.capabilities().max_in_flight:
            plan = self.scheduler.plan(self.clock.now())
            if plan.empty:
                break
            self.executor.submit(plan)
            self.plans.append(plan.step)
        self.scheduler.take_emissions()
        if not self.plans:
            return False
        self.scheduler.commit(self.executor.collect(self.plans.pop(0)), self.clock.now())
        return True

    def finish(self) -> dict[str, Receipt]:
        while self.turn():
            pass
        return dict(self.receipts.take_all())


REQUEST = st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(1, 3), st.integers(0, 40), st.integers(0, 3))


@given(
    st.lists(REQUEST, min_size=1, max_size=8), st.integers(40, 90), st.integers(1, 2), st.integers(0, 10**12),
    st.sets(st.integers(0, 7)),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_receipts_and_idle_time_are_the_wall_time(
    requests: list[tuple[int, int, int, int, int]], blocks: int, in_flight: int, pause: int, cancelled: set[int]
) -> None:
    engine = Engine(blocks, in_flight)
    for index, (prompt, answer, n, head, turns) in enumerate(requests):
        engine.clock.advance_to(engine.clock.now() + pause)
        engine.add(f"r{index}", prompt, answer, n, head)
        for _ in range(turns):
            engine.turn()
        if index in cancelled:
            engine.scheduler.cancel_request(f"r{index}", engine.clock.now())
    bills = engine.finish()
    assert len(bills) == sum(n for _, _, n, _, _ in requests)
    assert sum(bill.billed for bill in bills.values()) + engine.receipts.idle == engine.receipts.wall
    assert not list(engine.receipts.open())
    assert all(min(bill.queue, bill.prefill, bill.decode, bill.stalls) >= 0 for bill in bills.values())


def test_who_is_alone_pays_for_all_of_his_steps() -> None:
    engine = Engine()
    engine.add("a", prompt=40, answer=10)
    (bill,) = engine.finish().values()
    assert bill == Receipt(queue=0, prefill=bill.prefill, decode=bill.decode, stalls=0, computed=49, tenant="0")
    assert bill.billed == engine.receipts.wall and engine.receipts.idle == 0
    assert bill.prefill == pytest.approx(to_ps(COSTS.predict(StepShape(40, 1, 1, (40,), (40 * 41 // 2,)))), abs=2)


def test_decodes_of_equal_contexts_pay_alike_and_the_long_prompt_pays_for_itself() -> None:
    engine = Engine(budget=64)
    for id in "abc":
        engine.add(id, prompt=8, answer=20)
    bills = engine.finish()
    assert bills["a"].decode == pytest.approx(bills["c"].decode, rel=1e-9)

    engine = Engine(budget=64)
    engine.add("stream", prompt=8, answer=6)
    engine.turn()
    engine.add("prompt", prompt=60, answer=1)
    both = engine.finish()
    own = 0.002 * 60 + 0.001  # its tokens and its row; beside it, half of the step's fixed part
    assert both["prompt"].billed == pytest.approx(to_ps(own + 0.01), rel=0.01)
    assert both["stream"].stalls == pytest.approx(to_ps(own), rel=0.01)
    assert both["stream"].decode == pytest.approx(to_ps(5 * (0.02 + 0.003) - 0.01), rel=0.01)


def test_cached_tokens_are_not_paid_for_and_waiting_costs_nothing() -> None:
    engine = Engine()
    engine.add("a", prompt=41, answer=1, head=41)
    first = engine.finish()["a"]
    engine.add("b", prompt=41, answer=1, head=41)
    second = engine.finish()["b"]
    assert (second.cached, second.computed) == (40, 1) and second.billed < first.billed / 2

    engine = Engine()
    for id in "abcde":  # four rows
        engine.add(id, prompt=4, answer=30)
    bills = engine.finish()
    assert bills["e"].queue > 0 and bills["a"].queue == 0
    assert bills["e"].decode > bills["a"].decode, "alone, it has nobody to share the fixed part with"


def test_a_step_that_only_says_what_has_ended_is_idle_time_whatever_prices_steps() -> None:
    """Found by use: such a step of a server with a profile divided by its rows, and ended the engine."""
    step_time = StepTime(load_shape("llama-3.1-8b"), find_hardware("h100-sxm"))
    receipts = Receipts(step_time.parts, (None,))
    empty = StepDone(
        now=to_ps(2), step=1, planned=to_ps(1), idle=0, rows=(), counts=(), emitted=(), seconds=Seconds(),
        shape=StepShape(tokens=0, rows=0, kv_tokens=(0,), pairs=(0,), logit_rows=0),
    )  # fmt: skip
    receipts(empty)
    assert receipts.idle == receipts.wall
    assert step_time.parts(empty.shape).fixed >= 0
