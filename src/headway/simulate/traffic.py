"""The load a simulation is asked for, checked before anything is played."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from headway.core.clock import MAX_SECONDS
from headway.core.errors import BadInput
from headway.core.options import Option
from headway.simulate.arrivals import Arrivals, Closed, Lengths, Sessions, rows_of
from headway.simulate.driver import Source
from headway.simulate.served import recorded
from headway.traffic.load import ARRIVALS, Load
from headway.traffic.traces import TraceRow, read_trace, scaled


class Traffic(Lengths, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A load: when requests come, and how long they are. Without a rate, a concurrency or a recording one request is in
    flight at a time.

    Raises:
        BadInput: a value is not one that its option accepts, or two contradict each other.
    """

    requests: Annotated[int, Option("Requests; of a trace or log, at most.", least=1)] = 1000
    rate: Annotated[float | None, Option("Open loop: arrivals per second.", above=0)] = None
    arrival: Annotated[str, Option("How arrivals of --rate are spread.", ARRIVALS)] = "poisson"
    burstiness: Annotated[float, Option("Of gamma arrivals: 1 = Poisson, below 1 = bursts.", above=0)] = 1.0
    concurrency: Annotated[int | None, Option("Closed loop: requests in flight.", least=1)] = None
    trace: Annotated[
        Path | None, Option("Azure .csv or Mooncake .jsonl; with --rate only its lengths and prefixes.")
    ] = None
    log: Annotated[Path | None, Option("The event log of a server: its requests, as a trace.")] = None
    speed: Annotated[float, Option("Replay a trace this many times faster.", above=0)] = 1.0
    length_scale: Annotated[float, Option("Multiply a trace's lengths.", above=0)] = 1.0
    turns: Annotated[int, Option("Turns of a conversation, each with all that was said before.", least=1)] = 1
    think: Annotated[
        float, Option("Mean seconds between an answer and what follows it.", least=0, most=MAX_SECONDS)
    ] = 0.0
    seed: Annotated[int, Option("Of lengths, arrivals and the noise of steps.")] = 0
    seeds: Annotated[
        int, Option("Simulate with so many seeds, from --seed on, and say how much figures differ.", least=1, most=1000)
    ] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trace is not None and self.log is not None:
            raise BadInput("--log", "cannot be combined with --trace")
        if self.log is not None and not self.log.is_file():
            raise BadInput("--log", f"no such file: {self.log}; a server writes one with --event-log")
        if self.concurrency is not None and self.rate is not None:
            raise BadInput("--concurrency", "cannot be combined with --rate: each says when requests start")
        if self.burstiness != 1.0 and self.arrival != "gamma":
            raise BadInput("--burstiness", "needs --arrival gamma")
        if self.turns > 1 and (self.concurrency is not None or self.rate is None or self.recorded):
            raise BadInput("--turns", "needs --rate, at which conversations begin, and no recorded requests")

    @property
    def recorded(self) -> bool:
        return self.trace is not None or self.log is not None

    @property
    def load(self) -> Load:
        if self.concurrency is not None or not (self.rate is not None or self.recorded):
            return Load("closed", concurrency=self.concurrency or 1, seed=self.seed)
        if self.rate is None:
            return Load("trace", seed=self.seed)
        return Load(self.arrival, self.rate, burstiness=self.burstiness, seed=self.seed)

    def text(self) -> str:
        """What is played, in words."""
        given, load = self.trace or self.log, self.load
        of = given.name if given else f"{self.input_tokens:,} prompt and {self.output_tokens:,} answer tokens"
        ways = {"closed": f"{load.concurrency} in flight at a time", "trace": "when they came"}
        how = ways.get(load.kind, f"{load.rate:g} a second, {load.kind}")
        alone = load.kind == "closed" and self.concurrency is None
        other = "; --rate, --concurrency, --trace or --log make another" if alone else ""
        many = "up to " if given is not None else ""
        return f"load: {many}{self.requests:,} requests of {of}, {how}{other}"

    def at(self, rate: float, requests: int, seed: int) -> Traffic:
        """The same at another rate, other draws."""
        return msgspec.structs.replace(self, rate=rate, requests=requests, seed=seed, concurrency=None)

    def rows(self) -> list[TraceRow]:
        """What is asked."""
        if self.trace is not None:
            return scaled(read_trace(self.trace, self.requests, self.seed), self.speed, self.length_scale)
        if self.log is not None:
            return scaled(recorded(self.log)[: self.requests], self.speed, self.length_scale)
        return rows_of(self, self.requests, self.seed)

    def source(self, longest: int) -> Source:
        """A fresh one; conversations end before they are `longest` tokens long."""
        rows, load, shared, most = self.rows(), self.load, self.shared_prefix, self.max_tokens
        if load.kind == "closed":
            return Closed(rows, load.concurrency, self.think, shared, most)
        if self.turns > 1:
            return Sessions(rows, load, self.turns, self.think, longest, most, shared)
        return Arrivals(rows, load, shared, most)
