"""Loads that are played so that step times can be fitted to what a server then did."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from headway.bench.client import Endpoint
from headway.bench.exercise import Cell, exercise
from headway.core.errors import BadInput
from headway.engine.machine import wall_clock
from headway.roofline.profile import Rates
from tests.bench.mock import MockServer, Script

CELLS = (Cell(1, 20, 4), Cell(4, 40, 4), Cell(2, 30, 2))


def probed(*bandwidths: float) -> Iterator[Rates]:
    return iter([Rates(bandwidth, 1e11) for bandwidth in bandwidths])


def test_each_load_is_played_between_two_probes_and_left_out_if_they_disagree() -> None:
    probes = probed(1e10, 1.1e10, 2e10, 2e10)
    begin, told = wall_clock().now(), []
    with MockServer(Script(chunks=4)) as server:
        endpoint = Endpoint.parse(server.url, "completions")
        windows = asyncio.run(
            exercise(endpoint, 0.6, lambda: next(probes), lambda done, of: told.append((done, of)), CELLS)
        )
    assert [round(window.rates.bandwidth / 1e9, 1) for window in windows] == [10.5, 20.0]
    assert begin < windows[0].begin < windows[0].end < windows[1].begin < windows[1].end < wall_clock().now()
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_on_a_machine_that_is_never_steady_the_steadiest_half_counts() -> None:
    probes = probed(1e10, 2e10, 2.6e10, 6e10)
    with MockServer(Script(chunks=4)) as server:
        windows = asyncio.run(
            exercise(Endpoint.parse(server.url, "completions"), 0.6, lambda: next(probes), cells=CELLS)
        )
    assert [round(window.rates.bandwidth / 1e9, 1) for window in windows] == [14.1, 22.8]


def test_a_server_that_answers_nothing_is_named() -> None:
    with pytest.raises(BadInput, match="--url"):
        asyncio.run(exercise(Endpoint.parse("http://127.0.0.1:9", "completions"), 0.3, lambda: Rates(1e10, 1e11)))
