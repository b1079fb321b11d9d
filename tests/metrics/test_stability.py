"""Does a system keep up with its load, as a client sees it?"""

from __future__ import annotations

import numpy as np
import pytest

from headway.metrics.records import RequestRecord
from headway.metrics.stability import stability, stability_of

RUNS = 300


def blamed(load: float, requests: int, *, servers: int = 1, burstiness: float = 1.0) -> float:
    """Share of `RUNS` runs that are called not stable. Exponential services, first come first served; arrivals one a
    second, Poisson, or gamma with bursts."""
    noise = np.random.default_rng(1)
    at = np.cumsum(noise.gamma(burstiness, 1 / burstiness, (RUNS, requests)), axis=1)
    service = noise.exponential(load * servers, (RUNS, requests))
    free, every = np.zeros((RUNS, servers)), np.arange(RUNS)
    ended = np.empty_like(at)
    for index in range(requests):  # in all runs at once
        server = free.argmin(axis=1)
        ended[:, index] = np.maximum(free[every, server], at[:, index]) + service[:, index]
        free[every, server] = ended[:, index]
    ns = (at * 1e9).astype(np.int64), (ended * 1e9).astype(np.int64)
    return sum(not stability(*run)["stable"] for run in zip(*ns, strict=True)) / RUNS


@pytest.mark.parametrize(
    ("load", "requests", "servers", "burstiness", "most"),
    [
        (0.5, 100, 1, 1.0, 0.01), (0.8, 100, 1, 1.0, 0.05), (0.8, 1000, 1, 1.0, 0.01), (0.95, 1000, 1, 1.0, 0.05),
        (0.8, 100, 16, 1.0, 0.05), (0.8, 1000, 16, 1.0, 0.01), (0.8, 1000, 1, 0.1, 0.05), (0.8, 1000, 16, 0.2, 0.05),
    ],
)  # fmt: skip
def test_a_system_that_keeps_up_is_rarely_blamed(
    load: float, requests: int, servers: int, burstiness: float, most: float
) -> None:
    assert blamed(load, requests, servers=servers, burstiness=burstiness) <= most


@pytest.mark.parametrize(
    ("load", "requests", "servers", "least"),
    [(1.3, 300, 1, 0.9), (1.3, 1000, 16, 0.99), (1.1, 2500, 1, 0.9), (1.1, 3000, 16, 0.95)],
)
def test_a_system_that_does_not_is_found(load: float, requests: int, servers: int, least: float) -> None:
    assert blamed(load, requests, servers=servers) >= least


def test_a_burst_at_the_end_is_no_growth() -> None:
    """One request a second, each answered in half a second, and forty more in the last."""
    at = np.concatenate([np.arange(200), 200 + np.arange(40) / 40])
    ended = np.concatenate([np.arange(200) + 0.5, 200.5 + 0.5 * np.arange(40)])
    assert stability((at * 1e9).astype(np.int64), (ended * 1e9).astype(np.int64))["stable"]


def test_a_run_that_ends_before_its_first_answers_do_tells_nothing() -> None:
    at = np.arange(1, 101) * 10**8
    found = stability(at, at + 20 * 10**9)
    assert found["stable"] and "so short a run" in found["statement"]


@pytest.mark.parametrize(("seconds_each", "stable"), [(0.5, True), (0.98, True), (2.5, False)])
def test_a_server_slower_than_its_arrivals_does_not_keep_up(seconds_each: float, stable: bool) -> None:
    """One request a second, answered one after the other."""
    records, free = [], 0.0
    for index in range(60):
        free = max(free, index) + seconds_each
        records.append(RequestRecord(index=index, intended=index * 10**9 + 1, max_tokens=1, ended=int(free * 1e9) + 1))
    found = stability_of(records)
    assert found["stable"] is stable
    assert ("not stable" in found["statement"]) is not stable


def test_requests_that_never_end_are_inside() -> None:
    records = [RequestRecord(index=index, intended=index + 1, max_tokens=1) for index in range(40)]
    assert not stability_of(records)["stable"]
    assert stability_of(())["stable"]
