"""Where requests come from: open loops and traces, closed loops, and conversations of several turns."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from headway.core.clock import to_ps
from headway.core.errors import BadInput
from headway.core.options import Option, Options
from headway.scheduling.state import Emission
from headway.simulate.workload import Ask, made_up, of_row
from headway.traffic.load import Load, timetable
from headway.traffic.traces import TraceRow

MOST = 100_000_000  # requests
LONGEST = (1 << 24) - 1  # tokens


class Lengths(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lengths of made-up requests, log-normal about their means.

    Raises:
        BadInput: a value is not one that its option accepts.
    """

    input_tokens: Annotated[int, Option("Mean tokens of prompts.", least=1, most=LONGEST)] = 256
    output_tokens: Annotated[
        int, Option("Mean tokens of answers; the scheduler is not told.", least=1, most=LONGEST)
    ] = 64
    input_cv: Annotated[
        float, Option("Coefficient of variation of prompt lengths; 0 = all equal.", least=0, most=10)
    ] = 0.0
    output_cv: Annotated[float, Option("The same of answers.", least=0, most=10)] = 0.0
    shared_prefix: Annotated[int, Option("Prompt tokens equal in all prompts.", least=0, most=LONGEST)] = 0
    max_tokens: Annotated[
        int | None, Option("What clients ask for at most; default: the context.", least=1, most=LONGEST)
    ] = None

    def draw(self, noise: random.Random) -> tuple[int, int]:
        return _draw(self.input_tokens, self.input_cv, noise), _draw(self.output_tokens, self.output_cv, noise)


def _draw(mean: int, cv: float, noise: random.Random) -> int:
    """Log-normal with this mean and coefficient of variation, at least 1."""
    if not cv:
        return mean
    spread = math.log1p(cv * cv)
    return max(1, round(noise.lognormvariate(math.log(mean) - spread / 2, math.sqrt(spread))))


def rows_of(lengths: Lengths, count: int, seed: int) -> list[TraceRow]:
    """Made-up requests; the load says when they come."""
    if not 1 <= count <= MOST:
        raise BadInput("--requests", f"{count} is not a whole number from 1 to {MOST}")
    noise = random.Random(f"lengths {seed}")
    return [TraceRow(0.0, *lengths.draw(noise)) for _ in range(count)]


class Columns(msgspec.Struct):
    """A load of which nothing but times and lengths is decided beforehand.

    Attributes:
        rows: the requests; all begin with `shared` equal tokens and ask for `most` tokens.
        at: when the first of them come, ps; the others come when one ends, `think` ps later.
    """

    rows: Sequence[TraceRow]
    at: Sequence[int]
    think: int
    shared: int
    most: int | None


class Arrivals:
    """Requests that come by a timetable, whatever happens to them."""

    def __init__(self, rows: Sequence[TraceRow], load: Load, shared: int = 0, most: int | None = None) -> None:
        times = [to_ps(at) for at in timetable(load, [row.at for row in rows])]
        self.columns = Columns(rows, times, 0, shared, most)
        self._make = Maker(shared, most)

    def first(self) -> Iterator[Ask]:
        for number, (row, at) in enumerate(zip(self.columns.rows, self.columns.at, strict=True)):
            yield self._make(number, row, at)

    def then(self, ask: Ask, emission: Emission | None, now: int) -> None:
        return None


class Closed:
    """So many requests in flight at any time: whenever one ends the next one comes, after `think` seconds."""

    def __init__(
        self, rows: Sequence[TraceRow], concurrency: int, think: float = 0.0, shared: int = 0, most: int | None = None
    ) -> None:
        if concurrency < 1:
            raise BadInput("--concurrency", f"{concurrency} is not a whole number from 1")
        self.columns = Columns(rows, [0] * min(concurrency, len(rows)), to_ps(think), shared, most)
        self._rows = iter(enumerate(rows))
        self._make = Maker(shared, most)

    def first(self) -> Iterator[Ask]:
        asks = [self._next(at) for at in self.columns.at]  # before any of them is refused and the next one comes
        return iter([ask for ask in asks if ask is not None])

    def then(self, ask: Ask, emission: Emission | None, now: int) -> Ask | None:
        return self._next(now + self.columns.think)

    def _next(self, at: int) -> Ask | None:
        row = next(self._rows, None)
        return None if row is None else self._make(*row, at)


class Sessions:
    """Conversations: each turn's prompt is all that was said before and a new message, after `think` seconds in the
    mean (exponential). `rows` say what each turn adds; sessions begin by the load's timetable."""

    def __init__(
        self, rows: Sequence[TraceRow], load: Load, turns: int, think: float, longest: int, most: int | None = None,
        shared: int = 0,
    ) -> None:  # fmt: skip
        if turns < 1:
            raise BadInput("--turns", f"{turns} is not a whole number from 1")
        self._rows, self._turns, self._longest, self._think, self._most = rows, turns, longest, think, most
        begins = [TraceRow(0.0, 1, 1)] * -(-len(rows) // turns)
        self._times = timetable(load, [row.at for row in begins])
        self._make = Maker(shared, most)
        self._noise = random.Random(f"think {load.seed}")

    def first(self) -> Iterator[Ask]:
        for session, at in enumerate(self._times):
            number = session * self._turns
            ask = self._make(number, self._rows[number], to_ps(at))
            ask.session = str(session)
            yield ask

    def then(self, ask: Ask, emission: Emission | None, now: int) -> Ask | None:
        number = ask.number + 1
        over = ask.turn + 1 >= self._turns or number >= len(self._rows)
        if over or emission is None or emission.finish is None or emission.finish.reason not in ("stop", "length"):
            return None
        row = self._rows[number]
        context = emission.request.tokens
        if len(context) + row.input_tokens + row.output_tokens >= self._longest:
            return None  # the conversation has filled the context
        at = now + to_ps(self._noise.expovariate(1 / self._think) if self._think else 0.0)
        prompt = made_up(number, len(context) + row.input_tokens, context)
        return Ask(number, at, prompt, row.output_tokens, most=self._most, turn=ask.turn + 1, session=ask.session)


class Maker:
    """Requests from rows; all begin with the same `shared` tokens, if any."""

    def __init__(self, shared: int, most: int | None) -> None:
        self._shared = made_up((1 << 38) - 1, shared) if shared else []
        self._most = most

    def __call__(self, number: int, row: TraceRow, at: int) -> Ask:
        ask = of_row(number, row, self._shared)
        ask.at, ask.most = at, self._most
        return ask
