"""Callbacks on time. An event loop's own timers tick in milliseconds; a sleeping thread wakes within a tenth of one."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from types import TracebackType

from headway.metrics.records import NS_PER_S


class Pacer:
    """Calls back in the running event loop at moments of `time.perf_counter_ns`. Use as a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._due: list[tuple[int, int, Callable[[], object]]] = []  # a heap: (moment, order, callback)
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._keep_time, daemon=True)

    def __enter__(self) -> Pacer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()

    def at(self, moment: int, callback: Callable[[], object]) -> None:
        """Call back at `moment`, ns; callbacks of one moment keep their order."""
        with self._changed:
            heapq.heappush(self._due, (moment, next(self._order), callback))
            if self._due[0][0] == moment:
                self._changed.notify()

    def _keep_time(self) -> None:
        with self._changed:
            while not self._stopped:
                left = self._due[0][0] - time.perf_counter_ns() if self._due else None
                if left is not None and left <= 0:
                    self._loop.call_soon_threadsafe(heapq.heappop(self._due)[2])
                else:
                    self._changed.wait(None if left is None else left / NS_PER_S)
