"""Ranks that share memory: sums, and what the first tells the others. A rank is a thread here, with its own map."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from headway.ops import native

pytestmark = pytest.mark.skipif(native.why_not() is not None, reason="no native module")


@contextmanager
def shared(ranks: int, threads: int = 1) -> Iterator[list[Any]]:
    """One end per rank."""
    module = native.load()
    file = os.memfd_create("ranks")
    try:
        os.ftruncate(file, module.Ranks.bytes(ranks, threads))
        yield [module.Ranks(file, rank, ranks, threads) for rank in range(ranks)]
    finally:
        os.close(file)


def together(*bodies: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return [one.result() for one in [pool.submit(body) for body in bodies]]


def reduce_all(ends: list[Any], xs: np.ndarray, threads: int) -> np.ndarray:
    """xs [ranks, n] -> what each rank has afterwards."""
    out = xs.copy()
    jobs = [(end, row, worker) for end, row in zip(ends, out, strict=True) for worker in range(threads)]
    together(*[lambda job=job: job[0].all_reduce(job[1], job[2]) for job in jobs])
    return out


def in_order(xs: np.ndarray) -> np.ndarray:
    total = xs[0].copy()
    for x in xs[1:]:
        total += x
    return total


@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 576, 5000, 16384, 100_003])  # below and above a piece, and two rounds
@pytest.mark.parametrize(("ranks", "threads"), [(1, 1), (2, 1), (2, 3), (3, 1), (3, 2), (5, 1)])
def test_every_rank_has_the_sum_in_the_order_of_ranks_to_the_bit(ranks: int, threads: int, n: int) -> None:
    rng = np.random.default_rng(n)
    with shared(ranks, threads) as ends:
        for _ in range(3):  # both slots, and the first again
            xs = (rng.standard_normal((ranks, n)) * 10.0 ** rng.integers(-6, 6, (ranks, n))).astype(np.float32)
            for got in reduce_all(ends, xs, threads):
                np.testing.assert_array_equal(got, in_order(xs))


def test_a_rank_that_is_late_is_waited_for_asleep() -> None:
    with shared(2) as ends:
        xs = np.ones((2, 64), np.float32)
        waiting = ThreadPoolExecutor(1)
        first = waiting.submit(ends[0].all_reduce, xs[0])
        with pytest.raises(TimeoutError):
            first.result(timeout=0.2)  # far longer than it spins
        ends[1].all_reduce(xs[1])
        first.result()
        assert (xs == 2).all()


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1, 5_000_000])
def test_messages_of_any_size_are_heard_by_all_in_order(size: int) -> None:
    message = np.random.default_rng(size).bytes(size)
    with shared(3) as ends:
        told, *heard = together(
            lambda: [ends[0].tell(message), ends[0].tell(b"then")],
            *[lambda end=end: [end.hear(), end.hear()] for end in ends[1:]],
        )
        assert told == [None, None]
        assert heard == [[message, b"then"]] * 2


@pytest.mark.parametrize("wait", [lambda end: end.hear(), lambda end: end.all_reduce(np.ones(8, np.float32))])
def test_who_waits_for_a_rank_that_left_is_told(wait: Callable[[Any], Any]) -> None:
    with shared(2) as ends:
        waiting = ThreadPoolExecutor(1).submit(wait, ends[1])
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.1)
        ends[0].leave()
        with pytest.raises(RuntimeError, match="a rank has left"):
            waiting.result()


@pytest.mark.parametrize(("rank", "ranks", "threads"), [(2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 2, 0), (0, 2, 2)])
def test_no_such_rank_or_too_little_memory(rank: int, ranks: int, threads: int) -> None:
    module = native.load()
    file = os.memfd_create("ranks")
    try:
        os.ftruncate(file, module.Ranks.bytes(2, 1))
        with pytest.raises(ValueError, match=r"no such rank|too small"):
            module.Ranks(file, rank, ranks, threads)
    finally:
        os.close(file)
