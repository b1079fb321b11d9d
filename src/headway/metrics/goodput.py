"""Goodput: the highest arrival rate at which the share of requests that meet all targets holds, with confidence.

The rate is searched. At each rate requests are sent until the exact interval of the share lies wholly above the target
(it holds) or below it (it fails), in at most three looks whose error is shared between them; what stays undecided does
not hold. The rate doubles while it holds, then the gap between the highest that held and the lowest that did not is
halved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from headway.core.errors import BadInput
from headway.metrics.stats import share_interval

LOOKS = 3
CONFIDENCE = 0.95
MAX_TRIALS = 24
LOWEST = 1 / 64  # of the first rate: below it the search gives up


@dataclass(frozen=True)
class RateTrial:
    """What one rate showed. `verdict`: "holds", "fails" or "undecided"."""

    rate: float
    good: int
    requests: int
    low: float
    high: float
    verdict: str


Batch = Callable[[float, int, int], Awaitable[tuple[int, int]]]  # (rate, requests, look) -> (good, counted)


async def trial(batch: Batch, rate: float, requests: int, target: float) -> RateTrial:
    """Send batches of `requests`, twice that, and four times that, until the share is decided."""
    good = counted = 0
    found = RateTrial(rate, 0, 0, 0.0, 1.0, "undecided")
    for look in range(LOOKS):
        more_good, more = await batch(rate, requests * 2**look, look)
        good, counted = good + more_good, counted + more
        low, high = share_interval(good, counted, 1 - (1 - CONFIDENCE) / LOOKS)
        verdict = "holds" if low >= target else "fails" if high < target else "undecided"
        found = RateTrial(rate, good, counted, low, high, verdict)
        if verdict != "undecided":
            break
    return found


async def search(
    batch: Batch, first_rate: float, requests: int, target: float, resolution: float = 0.1, gpus: int = 1
) -> dict[str, Any]:
    """The goodput object of the JSON contract, all trials included. Cancelled (Ctrl-C), it has those until then.

    Args:
        first_rate: where to start, requests/s.
        requests: requests of the first look at each rate.
        target: share that must meet all targets.
        resolution: stop when the lowest rate that failed is within this share of the highest that held.
        gpus: what the rate is divided by for `per_gpu`.

    Raises:
        BadInput: not even perfect answers to that many requests would show that the target holds.
    """
    most = requests * (2**LOOKS - 1)
    if share_interval(most, most, 1 - (1 - CONFIDENCE) / LOOKS)[0] < target:
        raise BadInput("--requests", f"{requests} per rate can never prove a share of {target:g}; give more")
    trials: list[RateTrial] = []
    held, failed, rate, interrupted = 0.0, float("inf"), first_rate, False
    while len(trials) < MAX_TRIALS:
        try:
            found = await trial(batch, rate, requests, target)
        except asyncio.CancelledError:
            interrupted = True
            break
        trials.append(found)
        if found.verdict == "holds":
            held = rate
        else:
            failed = rate
        if held and failed <= held * (1 + resolution):
            break
        if not held and rate <= first_rate * LOWEST:
            break
        rate = next_rate(held, failed)
    reason = None if held else f"the targets were missed at every rate down to {failed:g} requests/s"
    if interrupted:
        reason = f"interrupted after {len(trials)} rates"
    return {
        "rate": held or None,
        "per_gpu": held / gpus if held else None,
        "fails_at": failed if failed < float("inf") else None,
        "searched": True,
        "interrupted": interrupted,
        "confidence": CONFIDENCE,
        "attainment_target": target,
        "resolution": resolution,
        "trials": [asdict(found) for found in trials],
        "reason": reason,
    }


def next_rate(held: float, failed: float) -> float:
    """What to try after the highest rate that held, 0 = none yet, and the lowest that did not, infinite = none yet."""
    return held * 2 if failed == float("inf") else (held * failed) ** 0.5 if held else failed / 2


def single(slo: dict[str, Any], rate: float | None, good_per_second: float | None) -> dict[str, Any]:
    """What one run at one rate says about goodput: a bound, not the highest rate."""
    held = bool(slo["held"]) and rate is not None
    how = "held with confidence" if slo["held"] else "was not held with confidence"
    return {
        "rate": rate if held else None,
        "searched": False,
        "good_requests_per_second": good_per_second,
        "reason": f"one rate is no search (use --search): the share of {slo['attainment_target']:g} {how} at this load",
    }
