"""What all ways to fetch a model share: how they fail, how they tell of themselves, and that they do not wait for ever.

A server may send a byte now and then, so that nothing that reads from it ever times out. What is fetched is therefore
watched from outside: by how much of it has come.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from headway.core.errors import HeadwayError

# Called now and then while fetching: (what is being done, bytes so far, bytes in all or None if not known).
Progress = Callable[[str, int, int | None], None]

POLL_SECONDS = 0.2
LEAST_BYTES = 256 << 10  # in STALL_SECONDS; what pip hands on at once
STALL_SECONDS = 180.0  # in which those who fetch try again by themselves


class FetchError(HeadwayError):
    """A model could not be fetched; says what to do."""

    exit_code = 2


class StallGuard:
    """Whether what is fetched keeps coming.

    Args:
        where: who sends it, for the sentence.
        now: seconds.
    """

    def __init__(self, where: str, now: Callable[[], float] = time.monotonic) -> None:
        self._where = where
        self._now = now
        self._since, self._mark = now(), 0

    def check(self, received: int) -> None:
        """
        Args:
            received: bytes so far; fewer than before where something began anew.

        Raises:
            FetchError: they come too slowly, or not at all.
        """
        now = self._now()
        if received - self._mark >= LEAST_BYTES:
            self._since, self._mark = now, received
        self._mark = min(self._mark, received)
        if now - self._since > STALL_SECONDS:
            raise FetchError(
                f"{self._where} sends too slowly: {received - self._mark} bytes in the last {STALL_SECONDS:g} s; run "
                "this again later, or give a path to a model"
            )


def watched(work: Callable[[], Any], watch: Callable[[], None]) -> Any:
    """What `work` gives, called in a thread of its own, which is left alone where `watch` raises: it is called now and
    then meanwhile."""
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # handed on
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True, name="fetching")  # the process does not wait for it
    thread.start()
    while thread.is_alive():
        thread.join(POLL_SECONDS)
        if thread.is_alive():
            watch()
    if failure:
        raise failure[0]
    return outcome[0]


def bytes_under(folder: Path) -> int:
    """Of all files in a folder and below, which other processes may write meanwhile; 0 if there is no folder."""
    total = 0
    for parent, _, names in os.walk(folder):  # which passes over folders that vanish
        for name in names:
            with suppress(FileNotFoundError):  # moved meanwhile
                total += os.stat(os.path.join(parent, name)).st_size
    return total
