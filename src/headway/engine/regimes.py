"""Which of a profile's regimes the machine is in, and whether it is in any, by the engine's own recent steps.

A shared machine changes under a process: memory gets faster or slower, neighbours come and go. A profile has a fit per
regime that it saw; the one that fits recent steps best predicts the next, from a moment that the event log names.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import exp, log

from headway.core.events import AnyEvent, Regime, StepDone
from headway.core.step import StepShape
from headway.roofline.timing import Timing
from headway.scheduling.budget import StepTimeModel

RECENT = 50  # steps that are looked back over
LASTING = 2 * RECENT  # steps for which the profile must be left before that is said: between two regimes none fits
GAIN = log(1.1)  # factor by which another regime must predict better to be taken
EDGE = log(1.1)  # and by which recent steps, in the mean, must be outside of the range of single ones

logger = logging.getLogger(__name__)


def nearest(timings: Sequence[Timing], costs: StepTimeModel, step: StepShape) -> int:
    """The regime that predicts a step most nearly as these costs do, which were measured at start."""
    seconds = costs.predict(step)
    return min(range(len(timings)), key=lambda index: abs(log(seconds / timings[index].model.predict(step))))


class RegimeWatch:
    """A fold over steps: how long they take, in times what each regime says.

    Args:
        timings: of the regimes. current: the one that predicts.
    """

    def __init__(self, timings: Sequence[Timing], current: int = 0) -> None:
        self._timings = timings
        self._current = current
        self._inside = True
        self._means = [0.0] * len(timings)  # of log(measured / predicted), recent steps
        self._steps = 0
        self._doubtful = 0  # steps for which the profile was left, or kept to again, and nobody told

    def __call__(self, event: AnyEvent) -> None:
        if not isinstance(event, StepDone) or event.steps > 1 or event.drafted or not event.seconds.executor:
            return
        self._steps += 1
        share = max(1 / RECENT, 1 / self._steps)
        for index, timing in enumerate(self._timings):
            ratio = log(event.seconds.executor / timing.model.predict(event.shape))
            self._means[index] += share * (ratio - self._means[index])
        self._doubtful = self._doubtful + 1 if self._holds(self._best()) != self._inside else 0

    def _best(self) -> int:
        """The regime that predicts recent steps, the current one if none does clearly better."""
        best = min(range(len(self._means)), key=lambda index: abs(self._means[index]))
        return self._current if abs(self._means[best]) + GAIN > abs(self._means[self._current]) else best

    def _holds(self, regime: int) -> bool:
        """Are recent steps within the regime's range, in the mean?"""
        timing, edge = self._timings[regime], EDGE if self._inside else 0.0
        return log(timing.low) - edge <= self._means[regime] <= log(timing.high) + edge

    def news(self, now: int) -> Regime | None:
        """What has changed since it was last asked: the regime, or whether the profile holds at all."""
        if self._steps < RECENT:
            return None
        best = self._best()
        inside = self._inside != (self._doubtful >= LASTING)
        if best == self._current and inside == self._inside:
            return None
        mean, timing = self._means[best], self._timings[best]
        if self._inside and not inside:
            logger.warning(
                "steps take %.2f times what the profile of this machine says (80 %% of single ones were within %.2f to "
                "%.2f): the machine has changed; measure it again with `headway probe` or `headway calibrate`",
                exp(mean), timing.low, timing.high,
            )  # fmt: skip
        self._doubtful = self._doubtful if inside == self._inside else 0
        self._current, self._inside = best, inside
        return Regime(now=now, regime=best, ratio=exp(mean), inside=inside)
