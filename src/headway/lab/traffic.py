"""Requests on their way through a server (SPEC E4): a simulation by the scheduler that serves, to be played back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from headway.core.clock import to_seconds
from headway.core.errors import BadInput, Rejected
from headway.core.step import StepPlan
from headway.engine.references import load_device, load_shape
from headway.report.units import seconds as duration
from headway.roofline.queueing import little
from headway.scheduling.state import Emission
from headway.simulate.arrivals import Arrivals, Lengths, rows_of
from headway.simulate.deploy import EngineSetup, deployed
from headway.simulate.driver import SimulatedReplica, run
from headway.simulate.workload import Answers, Ask
from headway.traffic.load import Load

POLICIES = ("chunked", "prefill-first", "fcfs", "static")
MOST_REQUESTS = 400
SAMPLES = 240  # of the law over time


class Traffic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is played."""

    model: str = "llama-3.1-8b"
    hardware: str = "h100-sxm"
    rate: float = 8.0
    prompt: int = 1000
    output: int = 200
    spread: float = 1.0
    policy: str = "chunked"
    rows: int = 64
    requests: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise BadInput("policy", f"{self.policy[:40]!r} is not one of {', '.join(POLICIES)}")
        if not 1 <= self.requests <= MOST_REQUESTS:
            raise BadInput("requests", f"{self.requests} is not a whole number from 1 to {MOST_REQUESTS}")
        if max(self.prompt, self.output) > 20_000:
            raise BadInput("prompt", "prompt and output are up to 20,000 tokens here")


class Watched:
    """An observer that keeps what a player needs: when each request was where, and its longest pause.

    Attributes:
        seen: per request: seconds of admission, first token and end; longest pause between two tokens.
        steps: (begin, rows, new tokens) of every plan.
    """

    def __init__(self) -> None:
        self.seen: dict[str, dict[str, float]] = {}
        self.steps: list[tuple[float, int, int]] = []
        self._last: dict[str, int] = {}
        self._run: tuple[Sequence[int], int] = ((), 0)

    def arrived(self, ask: Ask) -> None: ...

    def taken(self, id: str, now: int) -> None: ...

    def refused(self, ask: Ask, error: Rejected, now: int) -> None: ...

    def planned(self, replica: SimulatedReplica, plans: Sequence[StepPlan], now: int) -> None:
        for plan in plans:
            for row in plan.new:
                self.seen.setdefault(row.id, {"admitted": to_seconds(now)})
            if plan.work:
                self.steps.append((to_seconds(now), len(plan.work), sum([work.count for work in plan.work])))

    def repeated(self, plan: StepPlan, more: int) -> None: ...

    def emitted(self, emission: Emission, times: Sequence[int]) -> None:
        id = emission.request.id
        if emission.tokens:
            one, before = self.seen[id], self._last.get(id)
            if before is None:
                one["first"], before = to_seconds(times[0]), times[0]
            pause = to_seconds(max(times[0] - before, self._longest(times)))
            if pause >= one.get("pause", 0.0):
                one["pause"] = pause
            self._last[id] = times[-1]
        if emission.finish is not None:
            self.seen.setdefault(id, {})["end"] = to_seconds(times[-1])

    def _longest(self, times: Sequence[int]) -> int:
        """The longest step of a run, whose times all its rows share."""
        if len(times) == 1:
            return 0
        if times is not self._run[0]:
            self._run = times, max([after - before for before, after in pairwise(times)])
        return self._run[1]


def answer(asked: Traffic) -> dict[str, Any]:
    """Every request's way, and Little's law as it comes true."""
    setup = EngineSetup(policy=asked.policy, max_rows=asked.rows, prefix_cache=False, max_model_len=65536)
    one = deployed(load_shape(asked.model), load_device(asked.hardware), 1, setup)
    load = Load("poisson", asked.rate, seed=asked.seed)
    lengths = Lengths(
        input_tokens=asked.prompt, output_tokens=asked.output, input_cv=asked.spread, output_cv=asked.spread
    )
    rows = rows_of(lengths, asked.requests, asked.seed)
    source, answers, trail = Arrivals(rows, load), Answers(alike=True), Watched()
    arrived = [to_seconds(at) for at in source.columns.at]
    end = run([one.replica(answers)], source, trail, answers)
    ways = [
        {"n": number, "at": arrived[number], "prompt": row.input_tokens, "output": row.output_tokens,
         **trail.seen.get(str(number), {})}
        for number, row in enumerate(rows)
    ]  # fmt: skip
    ways = [way for way in ways if "end" in way]
    ttft = [way["first"] - way["at"] for way in ways]
    pauses = [way["pause"] for way in ways if "pause" in way]
    return {
        "seconds": to_seconds(end), "requests": ways, "steps": trail.steps, "law": law(ways, to_seconds(end)),
        "ttft": {"p50": _quantile(ttft, 0.5), "p90": _quantile(ttft, 0.9)}, "pause": {"p90": _quantile(pauses, 0.9)},
        "step_time": one.label, "rows": asked.rows,
        "see": _see(asked, ttft, pauses),
    }  # fmt: skip


def law(ways: Sequence[dict[str, Any]], seconds: float) -> dict[str, list[float]]:
    """Over time: how many are inside, their mean so far, and the rate so far times the mean seconds that those spent
    inside who have been there (until now, if they still are)."""
    times = seconds * np.arange(1, SAMPLES + 1) / SAMPLES
    at, end = (np.array([way[name] for way in ways])[:, None] for name in ("at", "end"))
    arrived = at < times
    spent = np.where(arrived, np.minimum(end, times) - at, 0.0).sum(axis=0)
    count = arrived.sum(axis=0)
    product = [
        little(float(n / now), float(together / n)) if n else 0.0
        for n, now, together in zip(count, times, spent, strict=True)
    ]
    inside = (arrived & (times < end)).sum(axis=0)
    return {"t": times.tolist(), "inside": inside.tolist(), "mean": (spent / times).tolist(), "product": product}


def _quantile(values: Sequence[float], share: float) -> float:
    """Nearest rank; 0 of nothing."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0


def _see(asked: Traffic, ttft: Sequence[float], pauses: Sequence[float]) -> str:
    half, most = duration(_quantile(ttft, 0.5)), duration(_quantile(ttft, 0.9))
    told = f"Of {asked.requests} requests at {asked.rate:g} per second half have their first token within {half}"
    told += f", nine in ten within {most}"
    pause = _quantile(pauses, 0.9)
    return f"{told}; nine in ten answers never pause for longer than {duration(pause)} under {asked.policy}."
