"""Progress where nobody watches a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

from headway.report.units import duration

SECONDS_PER_LINE = 5.0


class PlainProgress:
    """Progress as lines: one when a thing begins, one every `SECONDS_PER_LINE` with the time that is left, one when it
    is complete.

    Args:
        console: where they go.
        unit: of the figures: 1, or 1e6 for bytes shown as MB.
    """

    def __init__(self, console: Console, unit: float = 1, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._unit = unit
        self._now = now
        self._last = ""
        self._due: dict[str, float] = {}  # thing -> when its next line may come
        self._began: dict[str, tuple[float, int]] = {}  # when, and what was done by then

    def __call__(self, what: str, done: int, total: int | None) -> None:
        now = self._now()
        if now < self._due.get(what, now) and done != total:
            return
        self._due[what] = now + SECONDS_PER_LINE
        far = f": {self._figure(done)}" if total or self._unit != 1 else ""  # a step without parts has a name alone
        of = f" of {self._figure(total)}{self._left(what, done, total, now)}" if total else ""
        line = f"{what}{far}{of}"
        if line != self._last:  # who reports the end may do so twice
            self._console.print(line, markup=False, soft_wrap=True)
        self._last = line

    def _left(self, what: str, done: int, total: int, now: float) -> str:
        """How long the rest will take, if it goes on as until now."""
        began, first = self._began.setdefault(what, (now, done))
        if done in (first, total):
            return ""
        return f", about {duration((total - done) * (now - began) / (done - first))} left"

    def _figure(self, value: int) -> str:
        return str(value) if self._unit == 1 else f"{value / self._unit:.1f} MB"
