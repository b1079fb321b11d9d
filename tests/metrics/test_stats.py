"""Percentiles: their method, their intervals, and when they are refused."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.metrics.stats import describe, interval, inverse_cdf, percentile, share_interval, tail

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


@given(VALUES, st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_the_method_is_type_7(values: list[float], share: float) -> None:
    assert percentile(values, share) == pytest.approx(float(np.percentile(values, share * 100)), rel=1e-9, abs=1e-9)


@given(VALUES, st.sampled_from([0.5, 0.9, 0.99]))
def test_inverse_cdf_is_a_sample_with_enough_at_or_below_it(values: list[float], share: float) -> None:
    found = inverse_cdf(values, share)
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6
    assert sum(value < found for value in values) < share * len(values) + 1e-6


@pytest.mark.parametrize("count", [1, 40, 99])
def test_no_p99_below_100_samples(count: int) -> None:
    found = describe([1.0] * count, "nothing")
    assert found["p99"] is None
    assert "p99" in found["reason"] and "100" in found["reason"]


def test_with_100_samples_nothing_is_refused() -> None:
    found = describe([float(n) for n in range(100)], "nothing")
    assert found["reason"] is None
    assert found["p99"] == pytest.approx(98.01)


def test_no_samples_give_nulls_and_the_reason() -> None:
    found = describe([], "no token arrived")
    assert [found[name] for name in ("mean", "p50", "p90", "p95", "p99")] == [None] * 5
    assert found["reason"] == "no token arrived"


def test_gaps_of_one_request_get_no_interval() -> None:
    assert "ci95" not in describe([1.0] * 100, "nothing", independent=False)


def test_interval_of_the_median_of_100_is_the_textbook_one() -> None:
    """Order statistics 40 and 61 (counted from 1)."""
    assert interval([float(n) for n in range(1, 101)], 0.5) == (40.0, 61.0)


def test_no_interval_where_no_pair_of_samples_is_wide_enough() -> None:
    assert interval([float(n) for n in range(100)], 0.99) is None
    assert interval([1.0], 0.5) is None


@pytest.mark.parametrize(("count", "share"), [(30, 0.5), (100, 0.9), (400, 0.99)])
def test_intervals_cover_as_often_as_they_say(count: int, share: float) -> None:
    noise, covered, tries = random.Random(1), 0, 500
    for _ in range(tries):
        held = interval([noise.random() for _ in range(count)], share)
        covered += held is not None and held[0] <= share <= held[1]
    assert covered / tries >= 0.93


@pytest.mark.parametrize(
    ("good", "count", "low", "high"),
    [(9, 10, 0.5550, 0.9975), (0, 10, 0.0, 0.3085), (10, 10, 0.6915, 1.0), (50, 100, 0.3983, 0.6017)],
)
def test_share_interval_is_clopper_pearson(good: int, count: int, low: float, high: float) -> None:
    assert share_interval(good, count) == pytest.approx((low, high), abs=1e-4)


def test_failures_are_infinite_in_the_second_tail() -> None:
    found = tail([float(n) for n in range(98)], 2)
    assert found["n"] == 100
    assert found["p50"] == pytest.approx(49.5)
    assert found["p99"] == "inf"
    assert tail([1.0] * 10, 10)["p90"] == "inf"
    assert tail([1.0] * 20, 0)["p99"] is None


def test_a_quantile_that_touches_infinity_is_infinite() -> None:
    assert percentile([1.0, math.inf], 0.5) == math.inf
    assert percentile([1.0, 2.0, math.inf], 0.5) == 2.0
