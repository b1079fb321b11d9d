"""How long a measurement may take. A busy machine takes many times as long as an idle one, and shows less."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from headway.report.units import duration

BUSY = 3.0  # times as long as on an idle machine, and no more is learnt


class OutOfTime(Exception):
    """A measurement was given up."""


class Patience:
    """Runs out `BUSY` times `idle` seconds after it was made.

    Args:
        idle: seconds that the measurement takes on an idle machine.
    """

    def __init__(self, idle: float = math.inf, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seconds = BUSY * idle
        self._began = now()

    @property
    def over(self) -> bool:
        return self._now() - self._began > self._seconds

    def check(self) -> None:
        """
        Raises:
            OutOfTime: it has run out.
        """
        if self.over:
            raise OutOfTime

    def sentence(self, left_out: str) -> str:
        """Why something was not measured."""
        return f"{left_out}: not measured, for the machine was busy: {duration(self._seconds)} had passed"
