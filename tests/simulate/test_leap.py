"""Leaping over equal steps changes nothing: every time, token, plan and figure is the same to the picosecond."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway.core.clock import VirtualClock, to_ps
from headway.core.errors import Rejected
from headway.core.step import Capabilities, StepPlan, StepShape
from headway.executor.segments import LENGTH, Segments
from headway.executor.simulated import SimulatedRanks
from headway.roofline.fixed import FixedCosts
from headway.roofline.noise import BLOCK, CHUNK, DECODE, StepNoise
from headway.scheduling.budget import Budget
from headway.scheduling.policies import POLICIES
from headway.scheduling.scheduler import Scheduler
from headway.scheduling.state import Emission
from headway.simulate.driver import SimulatedReplica, run
from headway.simulate.trail import Trail
from headway.simulate.workload import Answers, Ask, made_up

COSTS = FixedCosts(step=1e-3, row=1e-5, token=1e-4, kv_token=3e-7, pair=1e-8)
ONE = {
    "after": 0.0, "prompt": 3, "output": 30, "most": None, "priority": 0, "tenant": "", "patience": None, "then": False
}  # fmt: skip
NOISE = {DECODE: tuple(900 + index % 7 * 50 for index in range(3 * BLOCK)), CHUNK: (1100, 4000, 990)}
POOLS = [((40,), (None,)), ((9,), (None,)), ((12, 7), (None, 5))]

asks = st.lists(
    st.fixed_dictionaries(
        {
            "after": st.sampled_from([0.0, 0.0, 1e-4, 2.5e-3, 0.04]), "prompt": st.integers(1, 20),
            "output": st.integers(1, 90), "most": st.none() | st.integers(1, 40),
            "priority": st.integers(0, 1), "tenant": st.sampled_from(["", "a", "b"]),
            "patience": st.sampled_from([None, None, 0.01, 0.08]), "then": st.booleans(),
        }
    ),
    min_size=1, max_size=10,
)  # fmt: skip


class Load:
    """The asks, and for some of them a next turn after 3 ms."""

    def __init__(self, drawn: list[dict[str, Any]]) -> None:
        self._drawn = drawn

    def first(self) -> Any:
        at = 0.0
        for number, one in enumerate(self._drawn):
            at += one["after"]
            yield self._ask(number, one, at, made_up(number, one["prompt"]))

    def _ask(self, number: int, one: dict[str, Any], at: float, prompt: Sequence[int]) -> Ask:
        patience = None if one["patience"] is None else to_ps(one["patience"])
        return Ask(
            number, to_ps(at), prompt, one["output"], one["most"], one["priority"], one["tenant"], patience
        )  # fmt: skip

    def then(self, ask: Ask, emission: Emission | None, now: int) -> Ask | None:
        if emission is None or ask.number >= len(self._drawn) or not self._drawn[ask.number]["then"]:
            return None
        said = list(emission.request.tokens)
        one = self._drawn[ask.number]
        return self._ask(ask.number + len(self._drawn), one, 0.003 + now / 1e12, made_up(99, len(said) + 1, said))


class Diary(Trail):
    """Everything an observer can see, in its order, but for plans: those of a run are never made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []
        self.tokens: dict[str, list[tuple[int, int]]] = {}
        self.plans = 0

    def arrived(self, ask: Ask) -> None:
        super().arrived(ask)
        self.seen.append(("arrived", ask.number, ask.at))

    def taken(self, id: str, now: int) -> None:
        super().taken(id, now)
        self.seen.append(("taken", id, now))

    def refused(self, ask: Ask, error: Rejected, now: int) -> None:
        super().refused(ask, error, now)
        self.seen.append(("refused", ask.number, now))

    def planned(self, replica: SimulatedReplica, plans: Sequence[StepPlan], now: int) -> None:
        super().planned(replica, plans, now)
        self.plans += 1
        self.seen += [("admitted", row.id, len(row.tokens), now) for plan in plans for row in plan.new]

    def emitted(self, emission: Emission, times: Sequence[int]) -> None:
        super().emitted(emission, times)
        id = emission.request.id
        self.tokens.setdefault(id, []).extend(zip(times, emission.tokens, strict=False))
        if emission.finish is not None:
            self.seen.append(("ended", id, emission.finish.reason, times[-1], emission.request.cached))


def play(leaps: bool, drawn: list[dict[str, Any]], pool: int, policy: str, reuse: bool, **options: Any) -> Any:
    blocks, windows = POOLS[pool]
    limits = Capabilities(
        block_size=4, blocks=blocks, windows=windows, max_rows=options["rows"], max_tokens_per_step=16,
        max_model_len=120 if pool == 0 else 36,
    )  # fmt: skip
    answers, clock, diary = Answers(), VirtualClock(), Diary()
    budget = Budget(milliseconds=options["milliseconds"])
    scheduler = Scheduler(
        limits, key=b"", policy=POLICIES[policy], budget=budget, model=COSTS, ttl=options["ttl"],
        max_wait=options["max_wait"], reuse=reuse, ttft=to_ps(0.05),
    )  # fmt: skip
    noise = None if options["seed"] is None else StepNoise(NOISE, options["seed"])
    executor = SimulatedRanks(limits, clock, COSTS, answers, noise=noise)
    replica = SimulatedReplica([scheduler], executor, clock, answers, leaps=leaps)
    end = run([replica], Load(drawn), diary, answers)
    return end, diary, replica.executor.busy, [pool.available for pool in scheduler.cache.pools]


@settings(max_examples=60, deadline=None)
@example([ONE | {"then": True}] * 3, 0, "chunked", True, 4, None, None, None, None)
@example([ONE | {"then": True}] * 3, 0, "chunked", True, 4, 1.5, None, None, 1)
@example([ONE, ONE | {"after": 0.04, "tenant": "a", "prompt": 20}] * 2, 0, "fair", True, 4, None, None, None, None)
@example([ONE, ONE | {"after": 0.0025}] * 3, 0, "slo", True, 4, 1.5, None, None, None)
@given(
    drawn=asks, pool=st.integers(0, 2), policy=st.sampled_from(list(POLICIES)), reuse=st.booleans(),
    rows=st.integers(1, 5), milliseconds=st.sampled_from([None, 1.5]), ttl=st.sampled_from([None, to_ps(0.01)]),
    max_wait=st.sampled_from([None, 0.05]), seed=st.sampled_from([None, 0, 1, 2]),
)  # fmt: skip
def test_leaping_is_stepping(
    drawn: list[dict[str, Any]], pool: int, policy: str, reuse: bool, rows: int, milliseconds: float | None,
    ttl: int | None, max_wait: float | None, seed: int | None,
) -> None:  # fmt: skip
    options = {"rows": rows, "milliseconds": milliseconds, "ttl": ttl, "max_wait": max_wait, "seed": seed}
    end, diary, busy, pools = play(False, drawn, pool, policy, reuse, **options)
    leapt = play(True, drawn, pool, policy, reuse, **options)
    assert leapt[1].tokens == diary.tokens
    assert leapt[1].seen == diary.seen
    assert (leapt[0], leapt[2], leapt[3]) == (end, busy, pools)
    assert (leapt[1].areas, leapt[1].spent) == (diary.areas, diary.spent)
    assert leapt[1].plans <= diary.plans
    assert [(one.steps, one.step_tokens, one.step_rows) for one in (diary, leapt[1])] == [
        (diary.plans, diary.step_tokens, diary.step_rows)
    ] * 2


@pytest.mark.parametrize("policy", list(POLICIES))
def test_it_does_leap(policy: str) -> None:
    options = {"rows": 4, "milliseconds": None, "ttl": None, "max_wait": None, "seed": None}
    assert play(False, [ONE] * 3, 0, policy, True, **options)[1].plans >= 31
    assert play(True, [ONE] * 3, 0, policy, True, **options)[1].plans <= 5


def test_tenants_that_share_a_machine_fairly_are_not_leapt_over() -> None:
    options = {"rows": 4, "milliseconds": None, "ttl": None, "max_wait": None, "seed": None}
    two = [ONE, ONE | {"tenant": "a"}]
    assert play(True, two, 0, "fair", True, **options)[1].plans == play(False, two, 0, "fair", True, **options)[1].plans


class Bent:
    """A model that is no line: what happens within a segment is a line all the same."""

    def predict(self, shape: StepShape) -> float:
        return 1e-3 + 1e-7 * shape.kv_tokens[0] ** 1.5


@pytest.mark.parametrize("cut", [1, 2, LENGTH - 1, LENGTH, LENGTH + 1, 3 * LENGTH])
def test_a_segment_goes_on_where_a_run_was_cut(cut: int) -> None:
    from headway.core.step import Work

    def plan(start: int) -> list[StepPlan]:
        return [StepPlan(0, work=(Work("a", start, 1, logits=1, sample=True),))]

    single, runs = Segments([None], Bent()), Segments([None], Bent())
    steps = [single.price(plan(10 + index)) for index in range(4 * LENGTH)]
    first = runs.price(plan(10))
    mark = runs.mark
    runs.ahead(4 * LENGTH)
    runs.back(mark)
    rest = runs.ahead(cut - 1)
    again = runs.price(plan(10 + cut))
    assert [first, *rest, again, *runs.ahead(4 * LENGTH - cut - 1)] == steps
    exact = [to_ps(1e-3 + 1e-7 * (11 + index) ** 1.5) for index in range(4 * LENGTH)]
    assert max(abs(a / b - 1) for a, b in zip(steps, exact, strict=True)) < 1e-2
