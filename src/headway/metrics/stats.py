"""Percentiles that name their method, carry their uncertainty, and are refused where the sample is too small.

Method: linear interpolation between order statistics (Hyndman and Fan's type 7, numpy's default). Confidence intervals
are distribution-free: the order statistics around the quantile between which it lies with at least the stated
probability (binomial), for independent samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

METHOD = "linear interpolation (Hyndman-Fan type 7)"
SHARES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
MIN_SAMPLES = {"p50": 1, "p90": 10, "p95": 20, "p99": 100}  # one sample beyond the quantile is expected
CONFIDENCE = 0.95


class Ordered:
    """Samples from the smallest to the largest; `counts`: of how many equal ones each value is."""

    def __init__(self, values: Sequence[float], counts: Sequence[int] | None = None) -> None:
        found = np.asarray(values, np.float64)
        order = np.argsort(found)
        self._values = found[order]
        self._ends = None if counts is None else np.cumsum(np.asarray(counts, np.int64)[order])
        self._mean = float(np.average(found, weights=counts)) if len(found) else None

    def __len__(self) -> int:
        return len(self._values) if self._ends is None or not len(self._ends) else int(self._ends[-1])

    def __getitem__(self, index: int) -> float:
        """Order statistic number `index`, from 0."""
        if self._ends is not None:
            index = int(np.searchsorted(self._ends, index, "right"))
        return float(self._values[index])

    def and_infinite(self, count: int) -> Ordered:
        """With so many infinite ones; not where values have counts."""
        assert self._ends is None, "these values have counts"
        return Ordered([*self._values, *([math.inf] * count)]) if count else self

    @property
    def mean(self) -> float | None:
        return self._mean

    @property
    def largest(self) -> float | None:
        return float(self._values[-1]) if len(self._values) else None


def _ordered(values: Sequence[float] | Ordered) -> Ordered:
    return values if isinstance(values, Ordered) else Ordered(values)


def percentile(values: Sequence[float] | Ordered, share: float) -> float:
    """Type 7 quantile; infinite values allowed (a quantile that touches one is infinite)."""
    ordered = _ordered(values)
    position = (len(ordered) - 1) * share
    low = math.floor(position + 1e-12)
    weight = position - low
    if weight < 1e-9:
        return ordered[low]
    if math.isinf(ordered[low + 1]):
        return math.inf
    return ordered[low] + weight * (ordered[low + 1] - ordered[low])


def inverse_cdf(values: Sequence[float], share: float) -> float:
    """The smallest value with at least `share` of the samples at or below it: no interpolation (type 1)."""
    return sorted(values)[max(0, math.ceil(len(values) * share - 1e-9) - 1)]


def interval(
    values: Sequence[float] | Ordered, share: float, confidence: float = CONFIDENCE
) -> tuple[float, float] | None:
    """Order statistics that hold the quantile with at least this confidence; None if no pair of them does."""
    ordered = _ordered(values)
    held = _statistics_around(len(ordered), share, confidence)
    return None if held is None else (ordered[held[0]], ordered[held[1]])


@lru_cache(256)
def _statistics_around(count: int, share: float, confidence: float) -> tuple[int, int] | None:
    """Indices of these order statistics of `count` samples."""
    if count < 2:
        return None
    below = _binomial_cdf(count, share)  # below[k] = P(at most k samples are below the quantile)
    tail = (1 - confidence) / 2
    low = int(np.searchsorted(below, tail, side="right")) - 1  # P(at most `low` below) <= tail
    high = int(np.searchsorted(below, 1 - tail, side="left"))  # P(more than `high` below) <= tail
    return None if low < 0 or high > count - 1 else (low, high)


def _binomial_cdf(count: int, share: float) -> np.ndarray:
    """float64 [count + 1], P(X <= k) for X ~ Binomial(count, share), summed from logarithms."""
    k = np.arange(count + 1)
    logs = np.cumsum(np.log(np.maximum(k, 1)))  # log k!
    terms = logs[count] - logs - logs[::-1] + k * math.log(share) + (count - k) * math.log1p(-share)
    return np.minimum(1.0, np.cumsum(np.exp(terms)))


def share_interval(good: int, count: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Clopper-Pearson interval of a share: exact, so never narrower than it claims."""
    tail = (1 - confidence) / 2
    low = 0.0 if good == 0 else _solve(lambda p: 1 - float(_binomial_cdf(count, p)[good - 1]) - tail)
    high = 1.0 if good == count else _solve(lambda p: tail - float(_binomial_cdf(count, p)[good]))
    return low, high


def requests_to_prove(good: int, count: int, target: float, most: int = 100_000) -> int | None:
    """How many requests, with this share of good ones, would show that the share is at least `target`; None if none
    would: the share is not above it, or by so little that `most` do not show it."""

    def proven(requests: int) -> bool:
        return share_interval(min(requests, round(requests * good / count)), requests)[0] >= target

    if not count or good / count <= target or not proven(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if proven(middle) else (middle, high)
    return high


def _solve(rising: Any) -> float:
    low, high = 1e-12, 1 - 1e-12
    for _ in range(60):
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def describe(values: Sequence[float] | Ordered, empty: str, independent: bool = True) -> dict[str, Any]:
    """mean, p50, p90, p95, p99 (null where refused, with the `reason`), n, max, and 95 % intervals.

    Args:
        empty: why there may be no values.
        independent: samples come from different requests; gaps of one request do not, and get no interval.
    """
    ordered = _ordered(values)
    count = len(ordered)
    found: dict[str, Any] = {"n": count, "mean": ordered.mean}
    reasons, bounds = [], {}
    for name, share in SHARES.items():
        enough = count >= MIN_SAMPLES[name]
        found[name] = percentile(ordered, share) if enough else None
        if not enough and count:
            reasons.append(f"{name}: {count} samples, at least {MIN_SAMPLES[name]} are needed")
        if enough and independent and (held := interval(ordered, share)):
            bounds[name] = list(held)
    if not count:
        reasons.append(empty)
    found["max"] = ordered.largest
    if independent:
        found["ci95"] = bounds
    found["reason"] = "; ".join(reasons) or None
    return found


def tail(values: Sequence[float] | Ordered, failed: int) -> dict[str, Any]:
    """The same percentiles with every failure counted as infinite: "inf" as text, JSON has no number for it."""
    everything = _ordered(values).and_infinite(failed)
    found: dict[str, Any] = {"n": len(everything)}
    for name, share in SHARES.items():
        if len(everything) < MIN_SAMPLES[name]:
            found[name] = None
            continue
        value = percentile(everything, share)
        found[name] = "inf" if math.isinf(value) else value
    return found
