"""Does a system keep up with what is asked of it? A queue that grows without end makes latencies of a run's length."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from headway.metrics.records import RequestRecord

KEEPS_UP = 0.95  # ended over arrived, while requests arrive, below which a system with a growing queue does not keep up
GREW = 2.5  # standard deviations of the number of arrivals that a queue must have grown by


def stability(arrived: int, ended: int, grew: float) -> dict[str, Any]:
    """Over the second half of the arrivals: what ended beside what arrived, and how the number inside grew."""
    ratio = ended / arrived if arrived else 1.0
    stable = ratio >= KEEPS_UP or grew < GREW * arrived**0.5
    statement = "the system keeps up with its load"
    if not stable:
        statement = (
            f"not stable: in the second half of the arrivals only {ratio:.0%} of what arrived ended, and the requests "
            f"inside grew by {grew:.0f}; latencies and queue say how long the run was, not what the system does"
        )
    return {"stable": stable, "ended_over_arrived": ratio, "grew_by": grew, "statement": statement}


def stability_of(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Of the requests of an open loop, as their client saw them."""
    arrivals = sorted(record.intended for record in records)
    ends = sorted(record.ended for record in records if record.ended)
    if not arrivals:
        return stability(0, 0, 0.0)
    middle, last = arrivals[(len(arrivals) - 1) // 2], arrivals[-1]
    arrived, ended = (bisect_right(times, last) - bisect_right(times, middle) for times in (arrivals, ends))
    return stability(arrived, ended, arrived - ended)
