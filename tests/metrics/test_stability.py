"""Does a system keep up with its load, as a client sees it?"""

from __future__ import annotations

import pytest

from headway.metrics.records import RequestRecord
from headway.metrics.stability import stability_of


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
