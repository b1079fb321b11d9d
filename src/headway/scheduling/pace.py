"""How fast an engine is, measured on its own steps. A fold over results: same results, same figures, same plans."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from headway.core.clock import to_seconds
from headway.core.step import StepResult
from headway.scheduling.flight import Flight

HALF_LIFE = 20.0  # seconds of steps after which a measured one counts half
LEARNING = 0.1  # weight of the last step's ratio of measured to predicted time
RATIOS = 0.5, 2.0  # bounds of a ratio: what is beyond says that something else happened


class Pace:
    """Measured speed.

    Attributes:
        slowness: measured over predicted time of steps that hold chunks.
    """

    def __init__(self) -> None:
        self.slowness = 1.0
        self._seconds = 0.0  # of steps before which somebody waited; these three fade
        self._prompt_tokens = 0.0
        self._admitted = 0.0

    def count(self, flight: Flight, result: StepResult, since: int, now: int) -> None:
        """Learn from a step that was committed at `now`; the one before at `since`, ps."""
        predicted, measured = flight.plan.predicted, result.seconds.executor
        chunks = [work.count for work in flight.plan.work if work.count > 1 or not work.sample]
        if predicted and measured and chunks:
            least, most = RATIOS
            ratio = min(max(measured / predicted, least), most)
            self.slowness += LEARNING * (ratio - self.slowness)
        if flight.waited:
            self._pass(to_seconds(now - since), sum(chunks), flight.admitted)

    def count_run(self, flight: Flight, since: int, times: Sequence[int]) -> None:
        """Learn from equal decode steps, which ended at `times`; the one before them at `since`, ps."""
        if flight.waited:
            for begin, end in pairwise([since, *times]):
                self._pass(to_seconds(end - begin), 0, 0)

    def _pass(self, seconds: float, prompt_tokens: int, admitted: int) -> None:
        """A step before which somebody waited."""
        fade = 0.5 ** (seconds / HALF_LIFE)
        self._seconds = self._seconds * fade + seconds
        self._prompt_tokens = self._prompt_tokens * fade + prompt_tokens
        self._admitted = self._admitted * fade + admitted

    def seconds_for_requests(self, requests: int, running: int) -> float | None:
        """How long admitting so many takes while others wait; None if nobody had to wait yet. As long as nobody was
        admitted, each of the `running` ones is taken to need as long again."""
        if not self._seconds:
            return None
        return requests * self._seconds / (self._admitted if self._admitted > 0.5 else max(running, 1))

    def seconds_for_tokens(self, tokens: int) -> float | None:
        """How long computing so many prompt tokens takes while others wait; None if nobody had to wait yet."""
        return tokens * self._seconds / self._prompt_tokens if self._prompt_tokens else None
