"""The load a simulation is asked for, checked before anything is played."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec

from headway.core.clock import MAX_SECONDS
from headway.core.errors import BadInput
from headway.simulate.arrivals import Arrivals, Closed, Lengths, Sessions, rows_of
from headway.simulate.driver import Source
from headway.simulate.served import recorded
from headway.traffic.load import Load
from headway.traffic.traces import TraceRow, read_trace, scaled

ARRIVALS = ("poisson", "constant", "gamma")


class Traffic(msgspec.Struct, frozen=True):
    """Options of a load.

    Attributes:
        lengths, requests: of made-up requests; of a trace or log, `requests` at most.
        rate, arrival, burstiness: an open loop. concurrency: a closed one.
        trace, log, speed, length_scale: recorded requests; with a rate only their lengths and prefixes are taken.
        turns, think: of conversations; think also of a closed loop.
    """

    lengths: Lengths = Lengths()
    requests: int = 1000
    rate: float | None = None
    arrival: str = "poisson"
    burstiness: float = 1.0
    concurrency: int | None = None
    trace: Path | None = None
    log: Path | None = None
    speed: float = 1.0
    length_scale: float = 1.0
    turns: int = 1
    think: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trace is not None and self.log is not None:
            raise BadInput("--log", "cannot be combined with --trace")
        if self.log is not None and not self.log.is_file():
            raise BadInput("--log", f"no such file: {self.log}; a server writes one with --event-log")
        if self.concurrency is not None and self.rate is not None:
            raise BadInput("--concurrency", "cannot be combined with --rate: each says when requests start")
        if self.arrival not in ARRIVALS:
            raise BadInput("--arrival", f"{self.arrival!r} is not one of {', '.join(ARRIVALS)}")
        if self.burstiness != 1.0 and self.arrival != "gamma":
            raise BadInput("--burstiness", "needs --arrival gamma")
        for name in ("speed", "length_scale"):
            if not 0 < getattr(self, name) < float("inf"):
                raise BadInput(f"--{name.replace('_', '-')}", f"{getattr(self, name):g} is not a number above 0")
        if not 0 <= self.think <= MAX_SECONDS:
            raise BadInput("--think", f"{self.think:g} is not a number from 0 to {MAX_SECONDS:g}")
        if self.turns > 1 and (self.concurrency is not None or self.rate is None or self.recorded):
            raise BadInput("--turns", "needs --rate, at which conversations begin, and no recorded requests")
        if self.requests < 1:
            raise BadInput("--requests", f"{self.requests} is not a whole number from 1")

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

    def at(self, rate: float, requests: int, seed: int) -> Traffic:
        """The same at another rate, other draws."""
        return msgspec.structs.replace(self, rate=rate, requests=requests, seed=seed, concurrency=None)

    def rows(self) -> list[TraceRow]:
        """What is asked."""
        if self.trace is not None:
            return scaled(read_trace(self.trace, self.requests, self.seed), self.speed, self.length_scale)
        if self.log is not None:
            return scaled(recorded(self.log)[: self.requests], self.speed, self.length_scale)
        return rows_of(self.lengths, self.requests, self.seed)

    def source(self, longest: int) -> Source:
        """A fresh one; conversations end before they are `longest` tokens long."""
        rows, load, lengths = self.rows(), self.load, self.lengths
        if load.kind == "closed":
            return Closed(rows, load.concurrency, self.think, lengths.shared, lengths.most)
        if self.turns > 1:
            sessions = replace(load, rate=load.rate)
            return Sessions(rows, sessions, self.turns, self.think, longest, lengths.most, lengths.shared)
        return Arrivals(rows, load, lengths.shared, lengths.most)
