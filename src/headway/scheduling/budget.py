"""How much a step may hold: tokens always, milliseconds when there is a step-time model."""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import msgspec

from headway.core.errors import BadInput
from headway.core.receipts import StepParts
from headway.core.step import StepShape
from headway.scheduling.shape import ShapeBuilder


class StepTimeModel(Protocol):
    """What `roofline.StepTime` gives the scheduler. Frozen during a run: same inputs, same plans."""

    def predict(self, shape: StepShape) -> float:
        """Seconds that a step of this shape takes; must not shrink when a row grows."""
        ...

    def parts(self, shape: StepShape) -> StepParts:
        """The step by what it grows with, for sharing it among its rows."""
        ...


@runtime_checkable
class RoutingModel(StepTimeModel, Protocol):
    """One that knows of experts."""

    def touched(self, shape: StepShape) -> float:
        """Experts of a layer that a step of this shape is expected to touch; 0 of a model without."""
        ...


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The size a step aims for. Prompt chunks are cut to it; decodes are never dropped for it, and what they leave is
    never nothing: prompts move in every step.

    Attributes:
        tokens: new tokens at most, None = whatever the executor can do.
        milliseconds: time that a step with running decodes should not exceed. Needs a step-time model.
        least: share of `tokens` and of `milliseconds` that prompts get even if the decodes alone use up the step.
        stretch: how many times as long as its decodes usually take alone a step may take, however long that is; 1 = no
            longer. Where steps vary much nearly all of them keep to it, but prompts get half of it in any case.
            Without it prompts trickle in where many decode, the batch stays small, and whoever waits pays for it.
        alone: how many times `milliseconds` a step may take that holds no decodes: nobody's stream waits for it, but
            whoever arrives does.

    Raises:
        BadInput: a field is out of range.
    """

    tokens: int | None = None
    milliseconds: float | None = None
    least: float = 0.125
    stretch: float = 1.0
    alone: float = 4.0

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise BadInput("tokens", f"{self.tokens} is not an integer >= 1")
        if self.milliseconds is not None and not self.milliseconds > 0:
            raise BadInput("milliseconds", f"{self.milliseconds} is not a number above 0")
        if not 0 < self.least <= 1:
            raise BadInput("least", f"{self.least} is not a share above 0, up to 1")
        for name in ("stretch", "alone"):
            if not getattr(self, name) >= 1:
                raise BadInput(name, f"{getattr(self, name)} is not a number from 1 up")

    def until(self, decodes: float) -> float:
        """Milliseconds that a step may take whose decodes alone take so many; 0 = it has none."""
        if self.milliseconds is None:
            return math.inf
        if not decodes:
            return self.alone * self.milliseconds
        return max(self.firm(decodes), self.stretch * decodes)

    def firm(self, decodes: float) -> float:
        """The same without stretching."""
        if self.milliseconds is None or not decodes:
            return self.until(decodes)
        return max(self.milliseconds, decodes + self.least * self.milliseconds)


def largest_chunk(shape: ShapeBuilder, start: int, most: int, model: StepTimeModel, milliseconds: float) -> int:
    """The most tokens from `start` on, 0 to `most`, that keep the step within `milliseconds`. By bisection, because
    the model is monotonic: log2(most) evaluations."""
    fits, too_many = 0, most + 1
    while too_many - fits > 1:
        count = (fits + too_many) // 2
        if model.predict(shape.with_row(start, count, 1)) * 1e3 <= milliseconds:
            fits = count
        else:
            too_many = count
    return fits
