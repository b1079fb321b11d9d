"""When requests start: the shape of a load, and the timetable of an open one."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from headway.core.errors import BadInput

LEAST, MOST = 1e-9, 1e9  # of rates, and of a shape of gamma
ARRIVALS = ("poisson", "constant", "gamma")  # of a constant rate


@dataclass(frozen=True)
class Load:
    """The shape of the traffic.

    Attributes:
        kind: "constant", "poisson", "gamma", "ramp", "trace" (items carry their times) or "closed".
        rate: requests per second; the ramp's first rate.
        rate_end: the ramp's last rate.
        burstiness: gamma's shape: 1 = Poisson, below 1 = bursts (coefficient of variation 1/sqrt).
        concurrency: requests in flight of a closed loop.
        seed: of the random arrivals.
    """

    kind: str = "poisson"
    rate: float = 1.0
    rate_end: float = 0.0
    burstiness: float = 1.0
    concurrency: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = {"--rate": self.rate, "--burstiness": self.burstiness}
        if self.kind == "ramp":
            numbers["--ramp-to"] = self.rate_end
        for option, value in numbers.items():
            if not LEAST <= value <= MOST:
                raise BadInput(option, f"{value!r} is not a number above 0, from {LEAST:g} to {MOST:g}")
        if self.concurrency < 1:
            raise BadInput("--concurrency", f"{self.concurrency!r} is not an integer >= 1")
        if self.kind not in ("constant", "poisson", "gamma", "ramp", "trace", "closed"):
            raise BadInput("--arrival", f"{self.kind!r} is not one of constant, poisson, gamma")

    @property
    def open(self) -> bool:
        return self.kind != "closed"


def timetable(load: Load, times: Sequence[float | None]) -> list[float]:
    """Arrival of each request, seconds from the start; empty for a closed loop.

    times: when a trace says that each comes.
    """
    noise, count = random.Random(f"arrivals {load.seed}"), len(times)
    if load.kind == "closed":
        return []
    if load.kind == "trace":
        return [at or 0.0 for at in times]
    if load.kind == "constant":
        return [index / load.rate for index in range(count)]
    if load.kind == "ramp":
        low, high = load.rate, load.rate_end
        length = 2 * count / (low + high)
        slope = (high - low) / length
        # low t + slope t^2 / 2 arrivals are expected until t; solved for t in the form that also holds for slope 0.
        expected = sorted(noise.uniform(0, count) for _ in range(count))
        return [2 * due / (low + math.sqrt(low * low + 2 * slope * due)) for due in expected]
    shape = 1.0 if load.kind == "poisson" else load.burstiness
    gaps = [noise.gammavariate(shape, 1.0) for _ in range(count + 1)]
    # Scaled to last count / rate seconds, so that the load is the one asked for: of a Poisson process with that many
    # arrivals in that time this is the exact distribution.
    scale = count / load.rate / max(sum(gaps), 1e-300)
    return [at * scale for at in itertools.accumulate(gaps[:-1])]
