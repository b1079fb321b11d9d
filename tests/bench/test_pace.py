"""The pacer: nothing early, nothing lost, in order."""

from __future__ import annotations

import asyncio
import threading
import time

from headway.bench.pace import Pacer

MS = 1_000_000


def test_callbacks_come_in_order_of_their_moments_and_never_early() -> None:
    async def work() -> list[tuple[int, int]]:
        called: list[tuple[int, int]] = []
        done = asyncio.Event()
        start = time.perf_counter_ns() + 5 * MS
        with Pacer() as pacer:
            for delay in (3, 1, 2, 1, 0):
                pacer.at(start + delay * MS, lambda delay=delay: called.append((delay, time.perf_counter_ns() - start)))
            pacer.at(start + 4 * MS, done.set)
            await done.wait()
        return called

    called = asyncio.run(work())
    assert [delay for delay, _ in called] == [0, 1, 1, 2, 3]
    assert all(at >= delay * MS for delay, at in called)


def test_a_moment_before_the_one_waited_for_is_not_missed() -> None:
    async def work() -> list[str]:
        called: list[str] = []
        soon = asyncio.Event()
        with Pacer() as pacer:
            pacer.at(time.perf_counter_ns() + 3600 * 1000 * MS, lambda: called.append("in an hour"))
            await asyncio.sleep(0.01)  # the thread sleeps by now
            pacer.at(time.perf_counter_ns() + MS, soon.set)
            await asyncio.wait_for(soon.wait(), 10)
        return called

    assert asyncio.run(work()) == []


def test_what_is_past_is_called_at_once_and_the_thread_ends_with_the_context() -> None:
    async def work() -> None:
        now = asyncio.Event()
        with Pacer() as pacer:
            pacer.at(0, now.set)
            await asyncio.wait_for(now.wait(), 10)

    before = threading.active_count()
    asyncio.run(work())
    assert threading.active_count() == before
