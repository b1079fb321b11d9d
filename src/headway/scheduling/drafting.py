"""How many drafts of each row a step verifies: as many as make tokens faster, by the step-time model (B11).

A draft that is accepted with probability p adds p tokens to its row's step, and some time to every row's. What counts
is the time that a row waits for a token, in the mean over all rows that decode, with drafts or without:

    gain = rows / sum of (1 / tokens expected of a row) * (seconds without / seconds with)

So nobody is held up by drafts of others that are not worth it, and as a mean is never below the harmonic one, tokens
per second gain at least as much. The drafts that save most come first, and as many are taken as make the most of that.

A draft model takes its own time, which counts: a pass over all rows that draft for each place, and a pass is predicted
as a step of that model. Where it would be no gain the draft model does not even keep up with the rows.

None if that is no gain. What the model says of steps with and without drafts is corrected by what such steps took; so
a few steps go without, to know what that takes, and what was once found slow is tried again after a while.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from headway.core.step import StepResult, StepShape
from headway.scheduling.budget import StepTimeModel
from headway.scheduling.flight import Flight
from headway.scheduling.shape import ShapeBuilder

LEAST_GAIN = 1.1  # what is predicted to be worth less is left alone: the model is not that good
LEAST_ODDS = 0.5  # of a draft that is verified where nothing predicts steps
CHUNK = 64  # prompt tokens that a step is taken to hold beside, where prompts are there
AT = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # drafts in a step for which the model is asked; lines between
LEARNING, DOWNWARDS = 0.125, 0.5  # what a step moves a ratio by; more where it was quicker: others only make it slower
FORGETTING = 1 / 256  # what a step without drafts moves the ratios of those with drafts by, towards its own
STALE = 64  # one step in so many goes without
RATIOS = 0.25, 4.0  # bounds of a step's measured over predicted time
PRIOR_ODDS = 0.7  # that a draft model's draft is accepted, before any was
LONGEST_LOOK, MOST_PASSES = 4, 64  # drafts per row that are looked at to know whether any pay; passes that there can be
KEPT, BUCKET = 512, 128  # curves of cost; tokens of context of which one is taken to be true

Ratios = tuple[tuple[int, int, float], ...]


class Drafting:
    """The control of draft lengths. A fold over steps: same steps, same lengths.

    Args:
        windows: per KV group, as in `Capabilities`.
        drafter: step times of the draft model; None = drafts cost nothing, or nobody knows what.
    """

    def __init__(self, windows: Sequence[int | None], drafter: StepTimeModel | None = None) -> None:
        self._windows = windows
        self._drafter = drafter
        self._passes: dict[tuple[int, int], float] = {}  # seconds of a pass, by rows and context
        self._odds = PRIOR_ODDS  # of drafts lately
        self._draft_ratio = 1.0  # measured over predicted time of the draft model's passes
        self._costs: dict[tuple[int, int, bool], list[float]] = {}
        self._model: StepTimeModel | None = None
        self._ratios: dict[tuple[int, int], float] = {}  # measured over predicted, by bits of rows and of drafts
        self._step = 0

    @property
    def priced(self) -> bool:
        """There is a draft model, and it is known what its passes take."""
        return self._drafter is not None

    @property
    def costs(self) -> dict[str, float] | None:
        """What a draft model's passes cost, if that is known."""
        return msgspec.structs.asdict(self._drafter) if isinstance(self._drafter, msgspec.Struct) else None

    @property
    def ratios(self) -> Ratios:
        """What was learned; of no rows: of a draft model's passes."""
        passes = ((0, 0, self._draft_ratio),) if self._drafter is not None else ()
        return (*passes, *((rows, drafts, ratio) for (rows, drafts), ratio in sorted(self._ratios.items())))

    def begin_with(self, ratios: Ratios) -> None:
        """Go on from what another one learned."""
        self._ratios = {(rows, drafts): ratio for rows, drafts, ratio in ratios if rows}
        self._draft_ratio = next((ratio for rows, _, ratio in ratios if not rows), 1.0)

    def begin_step(self, number: int, model: StepTimeModel | None) -> None:
        """What predicts the step that is planned now."""
        self._step = number
        self._odds += FORGETTING * (PRIOR_ODDS - self._odds)
        if model is not self._model:
            self._model, self._costs = model, {}

    def lengths(
        self, drafts: Sequence[tuple[int, float]], rows: int, context: float, most: int, prompts: bool
    ) -> list[int]:
        """How many drafts to verify of each row that has some.

        Args:
            drafts: (how many there are, probability that one is accepted) of each such row.
            rows: that decode in this step, with drafts or without. context: tokens that each has cached, in the mean.
            most: drafts in all.
            prompts: the step has prompts to compute as well.
        """
        likely = _best_first(drafts)
        if self._model is None:
            likely = [(odds, row) for odds, row in likely if odds >= LEAST_ODDS]
        likely = likely[:most]
        lengths = [0] * len(drafts)
        for _, odds in drafts:
            self._odds += LEARNING * (odds - self._odds) / len(drafts)
        seen = (rows.bit_length(), 0) in self._ratios
        if self._model is not None and (not seen or self._step % STALE == 0):
            return lengths
        taken, _ = self._worthwhile(likely, rows, context, prompts)
        for _, index in likely[:taken]:
            lengths[index] += 1
        return lengths

    def pays(self, rows: int, context: float, most: int) -> bool:
        """Whether a draft model should keep up with so many rows, of drafts as likely as those lately."""
        if self._model is None or self._drafter is None:
            return True
        each = max(1, min(LONGEST_LOOK, most // rows))
        likely = _best_first([(each, self._odds)] * rows)
        return self._worthwhile(likely[:most], rows, context, False)[0] > 0

    def _worthwhile(
        self, likely: Sequence[tuple[float, int]], rows: int, context: float, prompts: bool
    ) -> tuple[int, float]:
        """(how many of the drafts, given by probability and row, and what they gain)."""
        if self._model is None:
            return len(likely), 1.0
        costs = self._cost_curve(rows, context, prompts)
        best, best_gain, waits, drafting = 0, LEAST_GAIN, float(rows), 0.0
        tokens = [1.0] * rows
        alone = self._alone(rows, int(context)) if self._drafter is not None else 1.0
        lengths, widths = [0] * rows, [0] * MOST_PASSES
        for count, (odds, row) in enumerate(likely, 1):
            waits -= 1.0 / tokens[row]
            tokens[row] += odds
            waits += 1.0 / tokens[row]
            if self._drafter is not None:
                place, lengths[row] = lengths[row], lengths[row] + 1
                drafting += self._pass(widths[place] + 1, context) - self._pass(widths[place], context)
                widths[place] += 1
            gain = rows / waits / (_between(costs, count) + drafting / alone)
            if gain > best_gain:
                best, best_gain = count, gain
        return best, best_gain

    def _alone(self, rows: int, context: int) -> float:
        """Seconds of a step of so many decodes, as such steps took."""
        assert self._model is not None
        step = ShapeBuilder(self._windows)
        step.add_decodes([context] * rows)
        return self._model.predict(step.build()) * self._ratio(rows, 0)

    def _pass(self, rows: int, context: float) -> float:
        """Seconds of one pass of the draft model over so many rows, as such passes took."""
        assert self._drafter is not None
        key = (rows, int(context) // BUCKET)
        if key not in self._passes:
            step = ShapeBuilder((None,))
            step.add_decodes([int(context)] * rows)
            self._passes[key] = self._drafter.predict(step.build()) if rows else 0.0
        return self._passes[key] * self._draft_ratio

    def _passes_of(self, flight: Flight) -> float:
        """Predicted seconds of a step's drafts."""
        counts = [len(work.draft) for work in flight.plan.work]
        context = sum([work.start for work in flight.plan.work]) / len(counts)
        return sum(self._pass(sum([count > place for count in counts]), context) for place in range(max(counts)))

    def _cost_curve(self, rows: int, context: float, prompts: bool) -> list[float]:
        """Seconds of a step with `AT` drafts, over those of the decodes alone."""
        key = (rows, int(context) // BUCKET, prompts)
        if key not in self._costs:
            if len(self._costs) >= KEPT:
                self._costs.clear()
            self._costs[key] = self._predicted(rows, int(context), prompts)
        costs, plain = self._costs[key], self._ratio(rows, 0)
        return [1.0 + cost * self._ratio(rows, count) / plain - costs[0] for count, cost in zip(AT, costs, strict=True)]

    def _predicted(self, rows: int, context: int, prompts: bool) -> list[float]:
        """The same without what was learned."""
        assert self._model is not None
        step = ShapeBuilder(self._windows)
        for _ in range(rows):
            step.add(context, 1, 1)
        alone = self._model.predict(step.build())
        if prompts:
            step.add(0, CHUNK, 1)
        whole = step.build()
        return [self._model.predict(whole.verifying(count, rows)) / alone for count in AT]

    def _ratio(self, rows: int, drafts: int) -> float:
        """Measured over predicted time of steps of about this size; of those with the next fewer or more drafts, where
        none had so many."""
        size, count = rows.bit_length(), drafts.bit_length()
        known = [(abs(bits - count), bits, ratio) for (kind, bits), ratio in self._ratios.items() if kind == size]
        return min(known)[2] if known else 1.0

    def learn(self, flight: Flight, result: StepResult) -> None:
        """A step that was predicted, and computed."""
        work, predicted, seconds = flight.plan.work, flight.plan.predicted, result.seconds.executor
        if not predicted or not seconds or flight.plan.new or not all(one.decode for one in work):
            return
        if self._drafter is not None and result.seconds.draft and any(one.draft for one in work):
            least, most = RATIOS
            ratio = self._draft_ratio * result.seconds.draft / self._passes_of(flight)
            self._draft_ratio += LEARNING * (min(max(ratio, least), most) - self._draft_ratio)
        size, drafts = key = len(work).bit_length(), sum(len(one.draft) for one in work).bit_length()
        least, most = RATIOS
        ratio = min(max(seconds / predicted, least), most)
        before = self._ratios.get(key)
        if before is not None:
            ratio = before + (LEARNING if ratio > before else DOWNWARDS) * (ratio - before)
        self._ratios[key] = ratio
        for other in self._ratios if not drafts else ():
            if other[0] == size and other[1]:
                self._ratios[other] += FORGETTING * (self._ratios[key] - self._ratios[other])

    def undrafted(self, step: StepShape, rows: int, drafts: int) -> float | None:
        """Seconds that a step would have taken without its drafts; None without a model, or without drafts.

        Args:
            rows: of it that decode.
        """
        if self._model is None or not drafts:
            return None
        return self._model.predict(step.verifying(-drafts, rows + drafts)) * self._ratio(rows, 0)


def _best_first(drafts: Sequence[tuple[int, float]]) -> list[tuple[float, int]]:
    """(probability, row) of every draft, those first that shorten the wait for a token most. A row's own come in order:
    each is less likely than the one before, and saves less of a wait that is shorter.

    Args:
        drafts: (how many there are, probability that one is accepted) of each row.
    """
    found = []
    for row, (count, odds) in enumerate(drafts):
        tokens, likely = 1.0, 1.0
        for _ in range(count):
            likely *= odds
            found.append((1.0 / tokens - 1.0 / (tokens + likely), likely, row))
            tokens += likely
    found.sort(key=lambda one: (-one[0], one[2]))
    return [(likely, row) for _, likely, row in found]


def _between(costs: Sequence[float], count: int) -> float:
    """The cost of `count` drafts, on the lines between those at `AT`, and beyond the last on the last one."""
    after = min(bisect_right(AT, count), len(AT) - 1)
    low, high = AT[after - 1], AT[after]
    return costs[after - 1] + (costs[after] - costs[after - 1]) * (count - low) / (high - low)
