"""Threads for what would hold up the event loop: parsing, tokenising, building large answers. Short work first."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, TypeVar

from headway.serve.errors import ApiError

THREADS = 3
LARGE = 32 << 10  # bytes; one thread is kept for work below it
BYTES_PER_SECOND = 2000.0  # a second of waiting makes up for so many bytes ...
MOST_AGEING = 120.0  # ... and so many seconds for any number
MAX_WAITING_BYTES = 64 << 20
T = TypeVar("T")


class TextPool:
    """Runs work in threads, ranked by arrival and size: a small request does not wait for large ones that came before
    it, and a large one waits for smaller ones that came after it for `MOST_AGEING` at most."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="text")
        self._queue: list[tuple[float, int, int, Callable[[], Any], asyncio.Future[Any]]] = []
        self._numbers = count()
        self._running = 0
        self._large = 0  # of the running ones
        self._waiting_bytes = 0
        self._rate = 1e6  # bytes per second of all threads together, over about the last 20 jobs

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, which handles `size` bytes.

        Raises:
            ApiError: 503, too much is waiting already.
        """
        if self._waiting_bytes + size > MAX_WAITING_BYTES:
            retry = min(120, math.ceil(self._waiting_bytes / self._rate))
            raise ApiError(503, "too many large requests at once; try again", code="overloaded", retry_after=retry)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        rank = loop.time() + min(size / BYTES_PER_SECOND, MOST_AGEING)
        heapq.heappush(self._queue, (rank, next(self._numbers), size, work, done))
        self._waiting_bytes += size
        self._start()
        return await done

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        held = []
        while self._queue and self._running < THREADS:
            job = heapq.heappop(self._queue)
            _, _, size, work, done = job
            if done.cancelled():
                self._waiting_bytes -= size
            elif size >= LARGE and self._large == THREADS - 1:
                held.append(job)
            else:
                self._waiting_bytes -= size
                asyncio.get_running_loop().create_task(self._run(size, work, done))
                self._running += 1
                self._large += size >= LARGE
        for job in held:
            heapq.heappush(self._queue, job)

    async def _run(self, size: int, work: Callable[[], Any], done: asyncio.Future[Any]) -> None:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        try:
            result = await loop.run_in_executor(self._threads, work)
            if not done.cancelled():
                done.set_result(result)
        except Exception as error:
            if not done.cancelled():
                done.set_exception(error)
        finally:
            self._running -= 1
            self._large -= size >= LARGE
            if size >= LARGE:
                self._rate += 0.05 * (THREADS * size / max(loop.time() - begin, 1e-6) - self._rate)
            self._start()
