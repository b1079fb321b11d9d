"""What the verbs share to show things in a terminal: progress to stderr, answers to stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from headway.engine.llm import LLM
from headway.engine.options import EngineOptions
from headway.engine.results import Completion
from headway.model.source import Progress as Report

SECONDS_PER_LINE = 5.0
stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)


def step(text: str) -> None:
    """One line about what is happening, on stderr."""
    stderr.print(text)


@contextmanager
def fetching(quiet: bool = False) -> Iterator[Report]:
    """A callback for `model.source.resolve` that shows how far it is."""
    if quiet:
        yield lambda what, done, total: None
        return
    with progress(DownloadColumn(), TransferSpeedColumn(), unit=1e6) as report:
        yield report


@contextmanager
def progress(*columns: ProgressColumn, unit: float = 1) -> Iterator[Report]:
    """A callback that shows, on stderr, how far each of several things is: as bars in a terminal, else as plain lines.

    Args:
        columns: what a bar shows beside its name.
        unit: of the figures in a line: 1, or 1e6 for bytes shown as MB.
    """
    if not stderr.is_terminal:
        yield PlainProgress(unit)
        return
    shown = (TextColumn("{task.description}"), BarColumn(), *(columns or (MofNCompleteColumn(),)))
    with Progress(*shown, console=stderr, transient=True) as bars:
        yield _reporter(bars)


class PlainProgress:
    """Progress as lines: one when a thing begins, one every `SECONDS_PER_LINE`, one when it is complete."""

    def __init__(self, unit: float = 1, now: Callable[[], float] = time.monotonic) -> None:
        self._unit = unit
        self._now = now
        self._due: dict[str, float] = {}  # thing -> when its next line may come

    def __call__(self, what: str, done: int, total: int | None) -> None:
        now = self._now()
        if now < self._due.get(what, now) and done != total:
            return
        self._due[what] = now + SECONDS_PER_LINE
        of = f" of {self._figure(total)}" if total else ""
        stderr.print(f"{what}: {self._figure(done)}{of}", markup=False, soft_wrap=True)

    def _figure(self, value: int) -> str:
        return str(value) if self._unit == 1 else f"{value / self._unit:.1f} MB"


@contextmanager
def load_model(options: EngineOptions, *, quiet: bool = False) -> Iterator[LLM]:
    """Load a model with a progress bar, print its memory plan, close it at the end."""
    with fetching(quiet) as report:
        llm = LLM(progress=report, **msgspec.structs.asdict(options))
    try:
        if not quiet:
            engine = llm.engine
            memory = ", ".join(f"{label} {amount}" for label, amount in engine.memory.lines())
            where = f"{engine.info.name} on the {engine.backend.name} backend, {engine.threads} threads"
            step(f"[dim]{escape(where)}\n{memory}[/dim]")
        yield llm
    finally:
        llm.close()


def _reporter(bars: Progress) -> Report:
    """One bar per thing."""
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int | None) -> None:
        if what not in tasks:
            tasks[what] = bars.add_task(escape(what), total=total)
        bars.update(tasks[what], completed=done, total=total)

    return report


def print_pieces(pieces: Iterable[str]) -> str:
    """Print a text to stdout as it is made -> all of it. Ctrl-C stops it there."""
    text = ""
    try:
        for piece in pieces:
            text += piece
            sys.stdout.write(piece)
            sys.stdout.flush()
    except KeyboardInterrupt:
        stderr.print("[dim](stopped)[/dim]")
    sys.stdout.write("\n")
    return text


def cost_table(llm: LLM, completion: Completion) -> None:
    """TTFT, TPOT, tokens/s and cache use of one request."""
    choice = completion.choices[0]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row(
        "TTFT", _ms(choice.ttft), f"{completion.prompt_tokens} prompt tokens, {completion.cached_tokens} from the cache"
    )
    rate = f"{1 / choice.tpot:.1f} tokens/s" if choice.tpot else ""
    table.add_row("TPOT", _ms(choice.tpot), f"{rate}, {len(choice.tokens)} tokens, ended by {choice.finish.reason}")  # type: ignore[union-attr]
    memory = llm.engine.memory
    blocks = -(-(completion.prompt_tokens + len(choice.tokens)) // memory.block_size)
    table.add_row("KV cache", f"{blocks} blocks", f"of {memory.block_size} tokens; {min(memory.blocks)} in the pool")
    stderr.print(table)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
