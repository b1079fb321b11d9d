"""An executor that computes nothing and takes the time a step-time model says. The scheduler cannot tell."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from headway.core.clock import VirtualClock, to_ps, to_seconds
from headway.core.step import Capabilities, RowInit, Seconds, StepPlan, StepResult, StepShape, Work
from headway.executor.segments import Mark, Segments, ends_of
from headway.roofline.noise import StepNoise
from headway.scheduling.budget import StepTimeModel


class TokenSource(Protocol):
    """What rows emit in a simulation."""

    def token(self, row: RowInit, position: int) -> int:
        """The token of a request at a position of its sequence; the same whenever it is asked."""
        ...


class SimulatedRanks:
    """Plays the steps of a replica in virtual time. Its data-parallel ranks have a scheduler and rows each, and take
    every step together; most replicas have one rank.

    Args:
        limits: what each rank pretends to hold.
        clock: moved forward to the end of a step when it is collected.
        model: how long steps take.
        tokens: what rows emit. A draft is accepted while it equals what the source says, as a real model would.
        host: seconds per step outside of the model (scheduling, building inputs, detokenising): measure them, for
            leaving them out makes every latency too good.
        ranks: how many.
        noise: how steps vary; None = each takes what the model says.
    """

    def __init__(
        self,
        limits: Capabilities,
        clock: VirtualClock,
        model: StepTimeModel,
        tokens: TokenSource,
        host: float = 0.0,
        ranks: int = 1,
        noise: StepNoise | None = None,
    ) -> None:
        self.limits = limits
        self._clock = clock
        self._tokens = tokens
        self._host = host
        self._segments = Segments(limits.windows, model, host, noise)
        self._rows: list[dict[str, RowInit]] = [{} for _ in range(ranks)]
        self._flying: deque[tuple[int, list[StepResult]]] = deque()  # (when it is ready, a result per rank)
        self._ready = 0  # when the last one is
        self._run: tuple[list[int], Mark] | None = None  # ends of the steps of a run, and what was priced before it
        self.busy = 0  # ps of all steps

    @property
    def due(self) -> int:
        """When the oldest step in flight ends, ps."""
        return self._flying[0][0]

    @property
    def last_due(self) -> int:
        """When the step submitted last ends, ps."""
        return self._ready

    @property
    def in_flight(self) -> int:
        return len(self._flying)

    def shape(self) -> StepShape:
        """Of the step submitted last, all ranks together."""
        return self._segments.shape()

    def submit(self, plans: Sequence[StepPlan], steps: int = 1) -> int:
        """Start a step: a plan per rank, empty where a rank has nothing to do; or, while their shape is kept, a run of
        `steps` steps, the only one in flight, to be taken by `collect_run`. -> when the last one ends."""
        for plan, rows in zip(plans, self._rows, strict=True):
            for id in plan.gone:
                del rows[id]
            for row in plan.new:
                rows[row.id] = row
        took = self._segments.price(plans) if any(plan.work for plan in plans) else to_ps(self._host)
        self._ready = max(self._ready, self._clock.now()) + took
        self.busy += took
        if steps > 1:
            assert not self._flying, "a run is alone in flight"
            mark = self._segments.mark
            self._run = [self._ready, *ends_of(self._ready, self._segments.ahead(steps - 1))], mark
            self._flying.append((self._ready, []))
            self._set_end(self._run[0][-1])
            return self._ready
        seconds = Seconds(forward=to_seconds(took) - self._host, host=self._host)
        results = [
            StepResult(
                plan.step, {work.id: self._emit(work, rows) for work in plan.work if work.sample}, seconds=seconds
            )
            for plan, rows in zip(plans, self._rows, strict=True)
        ]
        self._flying.append((self._ready, results))
        return self._ready

    def cut(self, at: int) -> None:
        """Something arrives at `at`: a run in flight ends with the step that ends then or first thereafter."""
        if self._run is None:
            return
        ends, mark = self._run
        steps = bisect_left(ends, at) + 1
        if steps < len(ends):
            self._segments.back(mark)
            self._segments.ahead(steps - 1)
            self._run = ends[:steps], mark
            self._set_end(ends[steps - 1])

    def _set_end(self, end: int) -> None:
        self.busy += end - self._ready
        self._ready = end
        self._flying[0] = (end, [])

    def collect_run(self) -> list[int]:
        """When each step of the run in flight ended; the last one has."""
        assert self._run is not None, "a run is submitted as one"
        (ends, _), self._run = self._run, None
        self._flying.popleft()
        self._clock.advance_to(ends[-1])
        return ends

    def collect(self) -> list[StepResult]:
        """The results of the oldest step, at its end."""
        ready, results = self._flying.popleft()
        self._clock.advance_to(ready)
        return results

    def reset(self) -> None:
        for rows in self._rows:
            rows.clear()
        self._flying.clear()
        self._run = None

    def _emit(self, work: Work, rows: Mapping[str, RowInit]) -> tuple[int, ...]:
        """Accepted drafts, then the first token that differs from its draft, or the one after all of them."""
        row = rows[work.id]
        position = work.start + work.count - len(work.draft)
        emitted: list[int] = []
        for draft in (*work.draft, None):
            emitted.append(self._tokens.token(row, position + len(emitted)))
            if emitted[-1] != draft:
                break
        return tuple(emitted)
