"""The simulator against what can be known without one: queueing formulas, Little's law, and that nobody is lost.

A formula is a limit of endless runs, so it is reached in two steps: the simulator's waits are those of the textbook's
recursion on the same arrivals and services, request by request; and the recursion, run for millions of requests, is
within 1 % of the formula.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from headway.core.clock import VirtualClock, to_ps, to_seconds
from headway.core.errors import Rejected
from headway.core.step import Capabilities, StepPlan
from headway.executor.simulated import SimulatedRanks
from headway.roofline.fixed import FixedCosts
from headway.roofline.queueing import little, queue_seconds
from headway.scheduling.policies import policy_named
from headway.scheduling.scheduler import Scheduler
from headway.scheduling.state import Emission
from headway.simulate.driver import SimulatedReplica, run
from headway.simulate.trail import PARTS, Trail
from headway.simulate.workload import Answers, Ask

TICK = 1e-3  # seconds of a step, whatever is in it
MEAN = 500  # tokens of an answer, and so ticks of a service


class Jobs:
    """(arrival s, ticks): requests whose service is as many steps as their answer has tokens."""

    def __init__(self, jobs: Sequence[tuple[float, int]]) -> None:
        self._jobs = jobs

    def first(self) -> Iterator[Ask]:
        for number, (at, ticks) in enumerate(self._jobs):
            yield Ask(number, to_ps(at), [0], ticks)

    def then(self, ask: Ask, emission: Emission | None, now: int) -> None:
        return None


class Checked(Trail):
    """A trail that counts heads at every event."""

    replicas: Sequence[SimulatedReplica] = ()

    def planned(self, replica: SimulatedReplica, plans: Sequence[StepPlan], now: int) -> None:
        super().planned(replica, plans, now)
        self.check()

    def emitted(self, emission: Emission, times: Sequence[int]) -> None:
        super().emitted(emission, times)
        self.check()

    def refused(self, ask: Ask, error: Rejected, now: int) -> None:
        super().refused(ask, error, now)
        self.check()

    def check(self) -> None:
        inside = sum(self.inside.values())
        counts = self.counts
        assert counts["arrived"] == counts["finished"] + counts["refused"] + counts["aborted"] + inside
        assert len(self.records) == counts["finished"] + counts["refused"] + counts["aborted"]


def served(jobs: Sequence[tuple[float, int]], rows: int, policy: str = "chunked", **options: Any) -> Checked:
    """`rows` servers, a server being a row: a step takes one tick however many rows are in it."""
    limits = Capabilities(
        block_size=1 << 14, blocks=(rows,), windows=(None,), max_rows=rows,
        max_tokens_per_step=rows + 1, max_model_len=1 << 14,
    )  # fmt: skip
    answers, clock, trail = Answers(alike=True), VirtualClock(), Checked(detail=0)
    scheduler = Scheduler(limits, key=b"", policy=policy_named(policy), reuse=False, **options)
    replica = SimulatedReplica(
        [scheduler], SimulatedRanks(limits, clock, FixedCosts(step=TICK), answers), clock, answers, leaps=True
    )  # fmt: skip
    trail.close(run([replica], Jobs(jobs), trail, answers))
    return trail


def drawn(load: float, servers: int, count: int, cv2: float, seed: int) -> list[tuple[float, int]]:
    noise = random.Random(seed)
    rate = load * servers / (MEAN * TICK)
    at, jobs = 0.0, []
    for _ in range(count):
        at += noise.expovariate(rate)
        jobs.append((at, MEAN if cv2 == 0 else max(1, round(noise.expovariate(1 / MEAN)))))
    return jobs


def recursion(jobs: Sequence[tuple[float, float]], servers: int) -> list[float]:
    """Kiefer and Wolfowitz: each request takes the server that is free first. -> seconds waited."""
    free = [0.0] * servers
    waits = []
    for at, service in jobs:
        begin = max(at, heapq.heappop(free))
        heapq.heappush(free, begin + service)
        waits.append(begin - at)
    return waits


def erlang_wait(servers: int, offered: float) -> float:
    """Erlang C: probability that an arrival waits, with `offered` = rate * service seconds on `servers` servers."""
    blocked = 1.0
    for n in range(1, servers + 1):  # Erlang B by its recurrence
        blocked = offered * blocked / (n + offered * blocked)
    return blocked / (1.0 - offered / servers * (1.0 - blocked))


FORMULAS: dict[str, tuple[int, float, Callable[[float, float], float]]] = {
    "M/M/1": (1, 1.0, lambda load, service: queue_seconds(load, service)),
    "M/D/1": (1, 0.0, lambda load, service: queue_seconds(load, service, service_cv2=0.0)),
    "M/M/4": (4, 1.0, lambda load, service: erlang_wait(4, 4 * load) * service / (4 * (1 - load))),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_waits_are_those_of_the_recursion(name: str) -> None:
    """Within the step that is under way when a request arrives: an engine looks between steps."""
    servers, cv2, _ = FORMULAS[name]
    jobs = drawn(0.8, servers, 300, cv2, seed=1)
    trail = served(jobs, servers)
    by_number = sorted(trail.records, key=lambda record: record.index)
    waits = [(record.ttft_ms or 0.0) / 1e3 - TICK for record in by_number]
    expected = recursion([(at, ticks * TICK) for at, ticks in jobs], servers)
    late = [wait - right for wait, right in zip(waits, expected, strict=True)]
    assert min(late) > -1e-6
    busy = 1 + sum(right > 0 for right in expected)
    assert max(late) < busy * TICK, "each looked at within a tick of when it could begin"
    assert np.mean(waits) == pytest.approx(np.mean(expected), rel=0.01)


@pytest.mark.parametrize("name", FORMULAS)
def test_the_recursion_reaches_the_formula(name: str) -> None:
    """Ten thousand systems of a thousand requests side by side; the first hundred of each are for warming up."""
    servers, cv2, formula = FORMULAS[name]
    noise = np.random.default_rng(8)
    load, systems = 0.5, np.arange(10_000)
    free, now, waited = np.zeros((len(systems), servers)), np.zeros(len(systems)), 0.0
    for number in range(1000):
        now += noise.exponential(1 / (load * servers), len(systems))
        first = free.argmin(axis=1)
        begin = np.maximum(now, free[systems, first])
        free[systems, first] = begin + (noise.exponential(1.0, len(systems)) if cv2 else 1.0)
        waited += float(np.mean(begin - now)) * (number >= 100)
    assert waited / 900 == pytest.approx(formula(load, 1.0), rel=0.01)


@pytest.mark.parametrize("policy", ["chunked", "fcfs", "static", "prefill-first"])
def test_littles_law_holds_in_every_part_and_nobody_is_lost(policy: str) -> None:
    trail = served(drawn(0.7, 3, 200, 1.0, seed=2), 3, policy, max_wait=2.0)
    seconds = to_seconds(trail._now - (trail.begin or 0))
    arrived = trail.counts["arrived"]
    assert arrived == 200 and sum(trail.inside.values()) == 0
    for part in PARTS:
        law = little(arrived / seconds, to_seconds(trail.spent[part]) / arrived)
        assert trail.mean(part) == pytest.approx(law, rel=0.01, abs=1e-9)
    whole = sum((record.ended - record.intended) / 1e9 for record in trail.records)
    assert sum(map(trail.mean, PARTS)) * seconds == pytest.approx(whole, rel=1e-6)


def test_a_system_that_is_offered_too_much_is_told_apart() -> None:
    from headway.metrics.stability import stability_of

    assert stability_of(served(drawn(0.6, 2, 300, 1.0, seed=3), 2).records)["stable"]
    told = stability_of(served(drawn(1.6, 2, 300, 1.0, seed=3), 2).records)
    assert not told["stable"] and "not stable" in told["statement"]
