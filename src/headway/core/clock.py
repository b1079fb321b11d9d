"""Time as an integer of picoseconds, read and waited for through one object.

Nothing below the engine loop asks for the time: `now` is an argument. So the same scheduler runs against a real
clock and against a simulated one, and a simulation of days has no rounding drift.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

PS_PER_SECOND = 1_000_000_000_000
MAX_SECONDS = 1e9  # of any wait or pause that is asked for: thirty years


def to_ps(seconds: float) -> int:
    return round(seconds * PS_PER_SECOND)


def to_seconds(ps: int) -> float:
    return ps / PS_PER_SECOND


class Wakeup(Protocol):
    """What `wait` may be woken by; `threading.Event` is one."""

    def wait(self, timeout: float | None = None) -> bool: ...


class Clock(Protocol):
    def now(self) -> int:
        """Picoseconds since an arbitrary start; never decreases."""
        ...

    def wait(self, until: int | None, wakeup: Wakeup) -> None:
        """Return at `until` (ps; None = no limit) or when `wakeup` is set, whichever comes first."""
        ...


class WallClock:
    """Real time. `read_ns` is `time.perf_counter_ns`, passed in so that this floor does not import time."""

    def __init__(self, read_ns: Callable[[], int]) -> None:
        self._read_ns = read_ns

    def now(self) -> int:
        return self._read_ns() * 1000

    def wait(self, until: int | None, wakeup: Wakeup) -> None:
        wakeup.wait(None if until is None else max(0.0, to_seconds(until - self.now())))


class VirtualClock:
    """Simulated time: moves only by `advance_to`. Waiting jumps straight to `until`."""

    def __init__(self, start: int = 0) -> None:
        self._now = start

    def now(self) -> int:
        return self._now

    def advance_to(self, when: int) -> None:
        """Move forward to `when` (ps). Moving back is ignored, so time never decreases."""
        self._now = max(self._now, when)

    def wait(self, until: int | None, wakeup: Wakeup) -> None:
        if until is not None:
            self.advance_to(until)
