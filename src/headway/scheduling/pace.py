"""How fast an engine is, measured on its own steps. A fold over results: same results, same figures, same plans."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType

from headway.core.clock import to_seconds
from headway.core.step import StepResult
from headway.scheduling.budget import RoutingModel
from headway.scheduling.flight import Flight

HALF_LIFE = 20.0  # seconds of steps after which a measured one counts half
RATIOS = 0.2, 2.0  # bounds of a step's measured over predicted time: what is beyond says that something else happened
EXPERTS = 0.5, 2.0  # and of experts touched over those foretold
LEARNING, MOST_SKEW = 0.25, 2.0  # of the skew: what a step that touched half as many experts moves it by; its limit
RECENT, WITHIN = 64, 0.95  # of the last steps of a kind, what share is to end in time
OCTAVE = 256  # tokens before the chunks of the first of them


class Slowness:
    """How much longer steps take than was predicted. It rises within a few steps, and falls when all of the last
    `RECENT` were faster.

    Args:
        ratios: of steps before, the oldest first.
    """

    def __init__(self, ratios: Sequence[float] = ()) -> None:
        self._last = deque([1.0] * RECENT)
        self._sorted = [1.0] * RECENT
        for ratio in ratios:
            self.learn(ratio)

    @property
    def last(self) -> tuple[float, ...]:
        """Ratios of the last steps, the oldest first."""
        return tuple(self._last)

    @property
    def ratio(self) -> float:
        """What `WITHIN` of the last steps took at most, in times what was predicted: what the model is wrong by, and
        what single steps vary by."""
        return self._sorted[round(RECENT * WITHIN) - 1]

    @property
    def usual(self) -> float:
        """What half of the last steps took at most, in times what was predicted: what the model is wrong by."""
        return self._sorted[RECENT // 2]

    def learn(self, ratio: float) -> None:
        """A step took `ratio` times what was predicted."""
        least, most = RATIOS
        ratio = min(max(ratio, least), most)
        self._sorted.remove(self._last.popleft())
        self._last.append(ratio)
        insort(self._sorted, ratio)


def kind_of(start: int, beside: bool) -> int:
    """The kind of a step with chunks: the octave in which the deepest of them begins, `start`, and whether there are
    decodes beside. What the model is wrong by is alike within one, and can be quite another thing in the next."""
    return 2 * (start // OCTAVE).bit_length() + beside


class Pace:
    """Measured speed.

    Args:
        model: what foretells the experts that steps touch; None = nothing does.

    Attributes:
        skew: the exponent with which the model foretells as many experts as steps touched lately, from 0 (even routing)
            to `MOST_SKEW`; None before a step told. Approached step by step (Robbins and Monro, 1951): steps whose
            number of experts says nothing of it, as those of one token, leave it as it is.
    """

    def __init__(self, model: RoutingModel | None = None) -> None:
        self.skew: float | None = None
        self._model = model
        self._kinds: dict[int, Slowness] = {}
        self._seconds = 0.0  # of steps before which somebody waited; these three fade
        self._prompt_tokens = 0.0
        self._admitted = 0.0

    def slowness(self, kind: int) -> float:
        """Measured over predicted time of steps of a kind, so that nearly all of them end in time."""
        return self._nearest(kind).ratio

    def usual(self, kind: int) -> float:
        """Measured over predicted time of steps of a kind, so that half of them end in time."""
        return self._nearest(kind).usual

    def _nearest(self, kind: int) -> Slowness:
        """Of the kind, or of the next shallower one that was seen."""
        while kind >= 0 and kind not in self._kinds:
            kind -= 2
        return self._kinds.get(kind) or Slowness()

    @property
    def ratios(self) -> dict[int, tuple[float, ...]]:
        """What `slowness` was learned from, by kind."""
        return {kind: one.last for kind, one in self._kinds.items()}

    def predict_anew(self, ratios: Mapping[int, Sequence[float]] = MappingProxyType({})) -> None:
        """Forget what steps took in times what was predicted, but for these last ones: another model predicts."""
        self._kinds = {kind: Slowness(known) for kind, known in ratios.items()}

    def count(self, flight: Flight, result: StepResult, since: int, now: int) -> None:
        """Learn from a step that was committed at `now`; the one before at `since`, ps."""
        if self._model is not None and flight.shape is not None and result.experts:
            self._learn_skew(self._model.touched(flight.shape), sum(result.experts) / len(result.experts))
        plan, seconds = flight.plan, result.seconds.executor
        chunks = [work for work in plan.work if not work.decode]
        if plan.predicted and seconds and chunks:
            new = {row.id for row in plan.new}
            beside = any(work.decode and work.id not in new for work in plan.work)
            if beside:
                seconds = max(seconds, to_seconds(now - since + flight.idle))  # streams wait for the host as well
            kind = kind_of(max(work.start for work in chunks), beside)
            if kind not in self._kinds:
                self._kinds[kind] = Slowness(self._nearest(kind).last)
            self._kinds[kind].learn(seconds / plan.predicted)
        if flight.waited:
            self._pass(to_seconds(now - since), sum(work.count for work in chunks), flight.admitted)

    def _learn_skew(self, foretold: float, touched: float) -> None:
        if foretold > 0 and touched > 0:
            least, most = EXPERTS
            ratio = min(max(foretold / touched, least), most)
            self.skew = min(max((self.skew or 0.0) + LEARNING * (ratio - 1), 0.0), MOST_SKEW)

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
