"""A batch of prompts in progress, on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class _Rate(ProgressColumn):
    """Tokens per second since the start, of a counter that somebody else moves."""

    def __init__(self, tokens: Callable[[], int]) -> None:
        super().__init__()
        self._tokens = tokens
        self._first = tokens()
        self._began = time.monotonic()

    def render(self, task: Task) -> Text:
        rate = (self._tokens() - self._first) / max(time.monotonic() - self._began, 1e-9)
        return Text(f"{rate:,.0f} tokens/s")


@contextmanager
def batch_bar(console: Console, total: int, done: int, tokens: Callable[[], int]) -> Iterator[Callable[[int], None]]:
    """A bar with prompts, tokens/s and the time that is left; in a terminal it is gone at the end -> to be
    called with how many are done.

    Args:
        total, done: prompts, and those that are done already.
        tokens: how many were generated until now.
    """
    columns = (TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), _Rate(tokens), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=console.is_terminal) as bars:
        task = bars.add_task("prompts", total=total, completed=done)
        yield lambda now: bars.update(task, completed=now)
