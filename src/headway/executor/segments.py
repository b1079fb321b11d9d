"""How long simulated steps take, in whole picoseconds, a segment at a time.

While a plan keeps its shape (the same rows, one new token each) every step reads a little more cache than the one
before, so durations rise by nearly the same amount:

    duration of step i of a segment = first + i * growth,   0 <= i < LENGTH

The step-time model is asked at both ends of a segment, and what lies between is a line, by definition of this clock. So
a simulator that looks at every step and one that leaps over many have the same time to the picosecond.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.clock import to_ps
from headway.core.step import StepPlan, StepShape, Work
from headway.scheduling.budget import StepTimeModel
from headway.scheduling.shape import ShapeBuilder

LENGTH = 64  # steps: a roofline bends little over so many more tokens per row


class Segments:
    """Prices joint steps: one plan per data-parallel rank, all of which end together.

    Args:
        windows: per KV group, as in `Capabilities`.
        model: seconds of a step.
        host: seconds per step that the model leaves out.
    """

    def __init__(self, windows: Sequence[int | None], model: StepTimeModel, host: float = 0.0) -> None:
        self._windows = windows
        self._model = model
        self._host = host
        self._works: tuple[tuple[Work, ...], ...] = ()  # of the segment's first step
        self._ids: tuple[tuple[str, ...], ...] = ()
        self._next = 0  # index in the segment of the step after the last one priced
        self._first = 0
        self._growth: int | None = None  # asked for when a second step comes

    def price(self, plans: Sequence[StepPlan]) -> int:
        """Picoseconds of the next step."""
        if self._goes_on(plans):
            return self.after()
        self._works = tuple(plan.work for plan in plans)
        steady = all(one.count == 1 and one.sample and not one.draft for works in self._works for one in works)
        self._ids = tuple(tuple([one.id for one in works]) for works in self._works) if steady else ()
        copies = sum(len(plan.copies) for plan in plans)
        self._first, self._growth, self._next = self._ask(0, copies), None, 1
        return self._first

    def after(self) -> int:
        """Picoseconds of one more step of the same shape."""
        if self._next == LENGTH:
            self._works = tuple(tuple([_moved(one, LENGTH) for one in works]) for works in self._works)
            self._first, self._growth, self._next = self._ask(0), None, 0
        if self._growth is None and self._next:
            self._growth = (self._ask(LENGTH) - self._first) // LENGTH
        self._next += 1
        return self._first + (self._next - 1) * (self._growth or 0)

    def _goes_on(self, plans: Sequence[StepPlan]) -> bool:
        if not self._ids or any(plan.new or plan.gone or plan.copies for plan in plans):
            return False
        for plan, ids, works in zip(plans, self._ids, self._works, strict=True):
            if len(plan.work) != len(ids):
                return False
            if ids and plan.work[0].start != works[0].start + self._next:
                return False
            if any(one.id != id or one.count != 1 for one, id in zip(plan.work, ids, strict=True)):
                return False
        return True

    def shape_now(self) -> StepShape:
        """Of the step priced last."""
        return self.shape(self._next - 1)

    def _ask(self, steps: int, copies: int = 0) -> int:
        return to_ps(self._model.predict(self.shape(steps, copies)) + self._host)

    def shape(self, steps: int = 0, copies: int = 0) -> StepShape:
        """Of the segment's step number `steps`, all ranks together."""
        builder = ShapeBuilder(self._windows)
        for works in self._works:
            for one in works:
                builder.add(one.start + steps, one.count, one.logits)
        builder.copies = copies
        return builder.build()


def _moved(work: Work, steps: int) -> Work:
    return Work(work.id, work.start + steps, 1, logits=work.logits, sample=True)
