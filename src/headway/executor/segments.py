"""How long simulated steps take, in whole picoseconds, a segment at a time.

While a plan keeps its shape (the same rows, one new token each) every step reads a little more cache than the one
before, so durations rise by nearly the same amount:

    duration of step i of a segment = first + i * growth,   0 <= i < LENGTH

The step-time model is asked at both ends of a segment, and what lies between is a line, by definition of this clock.
Noise is a factor that depends on the number of the step alone. So a simulator that looks at every step and one that
leaps over many have the same time to the picosecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from headway.core.clock import to_ps
from headway.core.step import StepPlan, StepShape, Work
from headway.roofline.noise import CHUNK, DECODE, UNIT, StepNoise
from headway.scheduling.budget import StepTimeModel
from headway.scheduling.shape import ShapeBuilder

LENGTH = 64  # steps: a roofline bends little over so many more tokens per row


class Segment(NamedTuple):
    """Steps whose durations rise evenly: it begins `offset` steps after the plan, and `done` of its steps are priced.
    `after`: duration of the first step of the next segment; None = not asked for yet. ps."""

    offset: int
    first: int
    done: int
    after: int | None = None

    @property
    def growth(self) -> int:
        """Per step; floored, so that whole picoseconds are exact."""
        return 0 if self.after is None else (self.after - self.first) // LENGTH


Mark = tuple[Segment, int]  # the segment, and how many steps were priced


class Segments:
    """Prices joint steps: one plan per data-parallel rank, all of which end together.

    Args:
        windows: per KV group, as in `Capabilities`.
        model: seconds of a step.
        host: seconds per step that the model leaves out.
        noise: how they vary; None = not at all.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        model: StepTimeModel,
        host: float = 0.0,
        noise: StepNoise | None = None,
    ) -> None:
        self._windows = windows
        self._model = model
        self._host = host
        self._works: tuple[tuple[Work, ...], ...] = ()  # of the plan that the segments began with
        self._ids: tuple[list[str], ...] = ()
        self._now = Segment(0, 0, 0)
        self._noise = noise
        self._steps = 0  # priced

    def price(self, plans: Sequence[StepPlan]) -> int:
        """Picoseconds of the next step."""
        if self._goes_on(plans):
            return self.ahead(1)[0]
        self._works = tuple([plan.work for plan in plans])
        steady = all(one.count == 1 and one.sample and not one.draft for works in self._works for one in works)
        self._ids = tuple([[one.id for one in works] for works in self._works]) if steady else ()
        first = self._ask(0, sum([len(plan.copies) for plan in plans]))
        self._now = Segment(0, first, 1)
        self._steps += 1
        if self._noise is None:
            return first
        chunks = any(one.count > 1 + len(one.draft) for works in self._works for one in works)
        return first * self._noise.factor(self._steps - 1, CHUNK if chunks else DECODE) // UNIT

    def ahead(self, steps: int) -> list[int]:
        """Picoseconds of each of the `steps` steps that follow if the plan keeps its shape; they count as priced."""
        usual, begin = self._usual(steps), self._steps
        self._steps += steps
        if self._noise is None:
            return usual
        factors = self._noise.factors(begin, steps, DECODE)
        return [one * factor // UNIT for one, factor in zip(usual, factors, strict=True)]

    def _usual(self, steps: int) -> list[int]:
        """Without noise."""
        durations: list[int] = []
        while len(durations) < steps:
            now = self._now
            if now.after is None:
                now = now._replace(after=self._ask(now.offset + LENGTH))
            if now.done == LENGTH:
                assert now.after is not None
                self._now = Segment(now.offset + LENGTH, now.after, 0)
                continue
            count = min(steps - len(durations), LENGTH - now.done)
            begin, growth = now.first + now.done * now.growth, now.growth
            durations += range(begin, begin + count * growth, growth) if growth else [begin] * count
            self._now = now._replace(done=now.done + count)
        return durations

    @property
    def mark(self) -> Mark:
        """Where it is, to come back to by `back`."""
        return self._now, self._steps

    def back(self, mark: Mark) -> None:
        """Take back what was priced since."""
        self._now, self._steps = mark

    def _goes_on(self, plans: Sequence[StepPlan]) -> bool:
        """Are these the plans that keep the shape of those before?"""
        if not self._ids:
            return False
        ahead = self._now.offset + self._now.done
        for plan, ids, works in zip(plans, self._ids, self._works, strict=True):
            if plan.new or plan.gone or plan.copies or len(plan.work) != len(ids):
                return False
            if ids and plan.work[0].start != works[0].start + ahead:
                return False
            if [one.id for one in plan.work] != ids or any(one.count != 1 for one in plan.work):
                return False
        return True

    def _ask(self, steps: int, copies: int = 0) -> int:
        return to_ps(self._model.predict(self._shape(steps, copies)) + self._host)

    def shape(self) -> StepShape:
        """Of the step priced last, all ranks together."""
        return self._shape(self._now.offset + self._now.done - 1)

    def _shape(self, steps: int, copies: int = 0) -> StepShape:
        builder = ShapeBuilder(self._windows)
        for works in self._works:
            for one in works:
                builder.add(one.start + steps, one.count, one.logits, len(one.draft))
        builder.copies = copies
        return builder.build()


def ends_of(start: int, durations: Sequence[int]) -> list[int]:
    """When each step ends, of steps one after another from `start` on, ps."""
    return list(accumulate(durations, initial=start))[1:]
