"""The search for the highest rate that holds."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from headway.core.errors import BadInput
from headway.metrics.goodput import search, trial


class Endpoint:
    """Requests are good with a probability that falls at its capacity."""

    def __init__(self, capacity: float, above: float = 0.2, below: float = 1.0, seed: int = 0) -> None:
        self.capacity, self.above, self.below = capacity, above, below
        self.sent: list[float] = []
        self._noise = random.Random(seed)

    async def __call__(self, rate: float, requests: int, look: int) -> tuple[int, int]:
        self.sent.append(rate)
        chance = self.below if rate <= self.capacity else self.above
        return sum(self._noise.random() < chance for _ in range(requests)), requests


def find(endpoint: Any, first: float = 1.0, **options: Any) -> dict[str, Any]:
    return asyncio.run(search(endpoint, first, options.pop("requests", 60), options.pop("target", 0.9), **options))


@pytest.mark.parametrize("capacity", [0.3, 1.0, 7.7, 100.0])
def test_the_capacity_is_found_within_the_resolution(capacity: float) -> None:
    found = find(Endpoint(capacity))
    assert found["rate"] <= capacity < found["fails_at"]
    assert found["fails_at"] <= found["rate"] * 1.1
    assert found["searched"] and found["reason"] is None


def test_per_gpu() -> None:
    found = find(Endpoint(8.0), gpus=4)
    assert found["per_gpu"] == pytest.approx(found["rate"] / 4)


def test_an_endpoint_that_is_never_good_has_no_goodput_and_the_search_ends() -> None:
    found = find(Endpoint(0.0, above=0.0))
    assert found["rate"] is None and found["reason"]


def test_a_share_at_the_target_does_not_hold_with_confidence() -> None:
    """90 % good is not enough evidence for a target of 90 %: after three looks it is undecided."""
    done = asyncio.run(trial(Endpoint(10, below=0.9, seed=1), 1.0, 60, 0.9))
    assert done.verdict == "undecided"
    assert done.requests == 60 * 7
    assert done.low < 0.9 < done.high


def test_clear_cases_are_decided_at_the_first_look() -> None:
    assert asyncio.run(trial(Endpoint(10), 1.0, 60, 0.9)).requests == 60
    assert asyncio.run(trial(Endpoint(0.5), 1.0, 60, 0.9)).verdict == "fails"


def test_a_false_hold_is_rare() -> None:
    """At a true share of 85 % a target of 90 % is taken to hold in at most 5 % of searches."""
    held = [asyncio.run(trial(Endpoint(10, below=0.85, seed=seed), 1.0, 30, 0.9)).verdict for seed in range(200)]
    assert held.count("holds") <= 10


def test_too_few_requests_to_prove_anything_are_refused() -> None:
    with pytest.raises(BadInput, match="never prove"):
        find(Endpoint(1), requests=5)


def test_an_interrupted_search_keeps_its_trials() -> None:
    endpoint = Endpoint(5.0)

    async def batch(rate: float, requests: int, look: int) -> tuple[int, int]:
        if len(endpoint.sent) == 2:
            raise asyncio.CancelledError
        return await endpoint(rate, requests, look)

    found = find(batch)
    assert found["interrupted"] and found["reason"] == "interrupted after 2 rates"
    assert [one["rate"] for one in found["trials"]] == [1.0, 2.0] and found["rate"] == 2.0
