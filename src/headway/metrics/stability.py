"""Does a system keep up with what is asked of it? A queue that grows without end makes latencies of a run's length.

The number inside is a random walk that a stable system pulls back. Where nothing pulls, it grows by the rate of
arrivals less the rate of service, give or take what arrivals and service scatter. The rule is a t-test of that growth:
over equal parts of the time in which requests arrive, is the mean growth of a part above 0? Parts that follow each
other are nearly independent while the queue grows, and pull each other back where it does not (so a burst at the end
raises the scatter as much as the growth): a walk without pull is blamed in 5 % of runs, a stable system in fewer.
Batch means and their t-test: Law, Simulation Modeling and Analysis, 9.5.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headway.metrics.records import RequestRecord

PARTS = 20  # of the time in which requests arrive
STUDENT_T = 1.729  # 95 % quantile of Student's t with PARTS - 1 degrees of freedom
MATTERS = 0.01  # growth, as a share of the arrivals, below which it is no matter of a run's length
FIRST = 0.1  # share of the requests whose longest stay is the time in which a system fills


def stability(arrived: np.ndarray, ended: np.ndarray) -> dict[str, Any]:
    """Of the requests of an open loop.

    Args:
        arrived, ended: [requests] ns; ended 0 = it never did.

    Until the first requests have ended a system fills, whatever its load: that time is left out. Where too little is
    left, nothing can be said against the system.
    """
    at = np.sort(arrived)
    left = np.sort(ended[ended > 0])
    begin = np.searchsorted(at, _filled(arrived, ended)) if len(left) else 0
    came = len(at) - 1 - int(begin)
    if came < PARTS:
        return _told(True, 1.0, 0.0, "the system keeps up with its load, as far as so short a run can tell")
    edges = np.linspace(at[begin], at[-1], PARTS + 1)
    growth = np.diff(np.searchsorted(at, edges, "right") - np.searchsorted(left, edges, "right"))
    grew = float(growth.sum())
    ratio = 1 - grew / came
    if grew <= MATTERS * came or grew <= STUDENT_T * growth.std(ddof=1) * PARTS**0.5:
        return _told(True, ratio, grew, "the system keeps up with its load")
    return _told(False, ratio, grew, (
        f"not stable: while requests arrived only {ratio:.0%} as many ended, and those inside grew by {grew:.0f}; "
        "latencies and queue say how long the run was, not what the system does"
    ))  # fmt: skip


def stability_of(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """As their client saw them."""
    count = len(records)
    arrived = np.fromiter((record.intended for record in records), np.int64, count)
    return stability(arrived, np.fromiter((record.ended for record in records), np.int64, count))


def _filled(arrived: np.ndarray, ended: np.ndarray) -> int:
    """When a system has filled: the longest stay of the first requests, after the first of them came."""
    first = np.argsort(arrived, kind="stable")[: max(1, round(FIRST * len(arrived)))]
    stays = ended[first] - arrived[first]
    return int(arrived[first[0]] + max(stays.max(), 0))


def _told(stable: bool, ratio: float, grew: float, statement: str) -> dict[str, Any]:
    return {"stable": stable, "ended_over_arrived": ratio, "grew_by": grew, "statement": statement}
