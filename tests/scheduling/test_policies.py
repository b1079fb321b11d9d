"""What the named policies are for: classes, tenants, and times that were promised."""

from __future__ import annotations

import pytest

from headway.core.clock import VirtualClock, to_ps
from headway.core.errors import BadInput
from headway.core.request import Request, SamplingParams
from headway.core.step import Capabilities
from headway.roofline.fixed import FixedCosts
from headway.scheduling.invariants import check
from headway.scheduling.policies import policy_named
from headway.scheduling.scheduler import Scheduler
from tests.simulated import HashedTokens, SimulatedExecutor

COSTS = FixedCosts(step=1e-3, token=1e-4)


class Engine:
    """A scheduler on a simulated executor."""

    def __init__(self, policy: str, ttft: float | None = None, **limits: int) -> None:
        merged = {"block_size": 4, "max_rows": 2, "max_tokens_per_step": 16, "max_model_len": 400} | limits
        self.limits = Capabilities(blocks=(200,), windows=(None,), **merged)  # type: ignore[arg-type]
        self.clock = VirtualClock()
        self.scheduler = Scheduler(
            self.limits, key=b"", policy=policy_named(policy), model=COSTS, ttft=None if ttft is None else to_ps(ttft)
        )
        self.executor = SimulatedExecutor(self.limits, self.clock, COSTS, HashedTokens(1, 1 << 20))
        self.firsts: dict[str, int] = {}
        self.ends: dict[str, str] = {}
        self.served: dict[str, int] = {}

    def add(self, id: str, prompt: int = 4, answer: int = 4, tenant: str = "", priority: int = 0) -> None:
        base = 1000 * len(self.served) + 10_000
        self.served[id] = 0
        self.scheduler.add(
            Request(
                id, range(base, base + prompt), SamplingParams(seed=0), max_len=prompt + answer,
                arrival=self.clock.now(), tenant=tenant, priority=priority,
            )
        )  # fmt: skip

    def turn(self) -> None:
        plan = self.scheduler.plan(self.clock.now())
        emissions = self.scheduler.take_emissions()
        if not plan.empty:
            self.executor.submit(plan)
            emissions += self.scheduler.commit(self.executor.collect(plan.step), self.clock.now())
            for work in plan.work:
                self.served[work.id] += work.count
        for emission in emissions:
            if emission.tokens:
                self.firsts.setdefault(emission.request.id, self.clock.now())
            if emission.finish:
                self.ends[emission.request.id] = emission.finish.reason
        check(self.scheduler)

    def finish(self) -> None:
        while not self.scheduler.idle:
            self.turn()


def test_a_better_class_takes_the_place_of_a_worse_one() -> None:
    engine = Engine("priority")
    for id in "abc":
        engine.add(id, answer=30, priority=1)
    for _ in range(5):
        engine.turn()
    assert engine.scheduler.running == 2
    engine.add("urgent", priority=0)
    engine.turn()
    assert "urgent" in engine.firsts and engine.scheduler.running == 2
    engine.finish()
    assert engine.ends == dict.fromkeys(["a", "b", "c", "urgent"], "length")
    assert engine.firsts["urgent"] < engine.firsts["c"]


def test_a_worse_class_takes_nobodys_place() -> None:
    engine = Engine("priority")
    for id in "ab":
        engine.add(id, answer=30)
    engine.turn()
    engine.add("later", priority=1)
    for _ in range(5):
        engine.turn()
    assert engine.scheduler.running == 2 and "later" not in engine.firsts
    engine.finish()


def shares(policy: str) -> tuple[int, int]:
    """Prompt tokens of two tenants, one with many requests and one that always has one waiting, after a while."""
    engine = Engine(policy, max_rows=2)
    for number in range(30):
        engine.add(f"many{number}", prompt=40, answer=2, tenant="many")
    for number in range(20):
        engine.add(f"few{number}", prompt=40, answer=2, tenant="few")
    for _ in range(40):
        engine.turn()
    by_tenant = {name: sum(n for id, n in engine.served.items() if id.startswith(name)) for name in ("many", "few")}
    engine.finish()
    assert set(engine.ends.values()) == {"length"}
    return by_tenant["many"], by_tenant["few"]


def test_tenants_have_equal_shares_however_much_they_ask() -> None:
    many, few = shares("fair")
    assert 0.8 < many / few < 1.25
    many, few = shares("fcfs")
    assert few == 0 or many / few > 3


def test_who_was_away_comes_back_without_credit() -> None:
    engine = Engine("fair")
    engine.add("a", prompt=200, answer=40, tenant="busy")
    for _ in range(20):
        engine.turn()
    engine.add("b", tenant="new")
    engine.turn()
    accounts = engine.scheduler.state.accounts
    assert accounts["new"] >= 0.9 * accounts["busy"] > 0
    engine.finish()
    assert not engine.scheduler.state.accounts, "nobody is there"


def test_the_least_slack_goes_first_and_what_is_late_is_turned_away() -> None:
    engine = Engine("slo", ttft=0.05, max_rows=4)
    engine.add("short", prompt=8)
    engine.add("long", prompt=200)  # 13 steps of 2.6 ms: hardly any slack
    engine.turn()
    assert engine.served == {"short": 0, "long": 16}
    engine.add("hopeless", prompt=390, answer=2)  # takes longer than it may
    engine.finish()
    assert engine.ends == {"short": "length", "long": "length", "hopeless": "abort"}
    assert "hopeless" not in engine.firsts
    assert engine.firsts["long"] <= to_ps(0.05)


def test_without_a_target_it_is_the_order_of_arrival() -> None:
    engine = Engine("slo")
    engine.add("first", prompt=100)
    engine.add("second", prompt=4)
    engine.turn()
    assert engine.served["first"] == 16
    engine.finish()
    assert set(engine.ends.values()) == {"length"}


@pytest.mark.parametrize("policy", ["fair", "slo"])
def test_who_counts_in_seconds_needs_a_model(policy: str) -> None:
    limits = Capabilities(
        block_size=4, blocks=(9,), windows=(None,), max_rows=1, max_tokens_per_step=4, max_model_len=9
    )
    with pytest.raises(BadInput, match=policy):
        Scheduler(limits, key=b"", policy=policy_named(policy))
