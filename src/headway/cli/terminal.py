"""What the verbs share to show things in a terminal: progress to stderr, answers to stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from rich.cells import cell_len
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
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from headway.cli.repetition import Circling
from headway.engine.llm import LLM
from headway.engine.options import EngineOptions
from headway.engine.results import Completion
from headway.model.source import Progress as Report
from headway.report.progress import PlainProgress
from headway.report.prose import PROSE, folded
from headway.roofline.memory import MemoryPlan

BAR = 30  # characters
stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)


def step(text: str) -> None:
    """One line about what is happening, on stderr."""
    _print(text)


def _print(text: str, style: str = "") -> None:
    """In a terminal lines are broken between words; elsewhere they are whole."""
    stderr.print(text, style=style, soft_wrap=not stderr.is_terminal)


def wrapped(text: str, indent: int = 0, console: Console = stdout) -> str:
    """A paragraph in lines as long as the terminal's, or piped `PROSE`; all but the first are indented."""
    return folded(text, console.width if console.is_terminal else PROSE, indent)


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
        yield PlainProgress(stderr, unit)
        return
    shown = (TextColumn("{task.description}"), BarColumn(), *(columns or (MofNCompleteColumn(), TimeRemainingColumn())))
    with Progress(*shown, console=stderr, transient=True) as bars:
        yield _reporter(bars)


@contextmanager
def load_model(options: EngineOptions, *, quiet: bool = False) -> Iterator[LLM]:
    """Load a model with a progress bar, print its memory plan, close it at the end."""
    with fetching(quiet) as report:
        llm = LLM(progress=report, **msgspec.structs.asdict(options))
    try:
        if not quiet:
            engine = llm.engine
            shown = [*engine.memory.lines(), *engine.disk_lines(), *engine.draft_lines(), *engine.sampling_lines()]
            memory = ", ".join(f"{label} {amount}" for label, amount in shown)
            where = f"{engine.info.name} on the {engine.backend.name} backend, {engine.threads} threads"
            step(f"[dim]{escape(where)}\n{escape(wrapped(memory, console=stderr))}[/dim]")
        yield llm
    finally:
        llm.close()


@contextmanager
def doing() -> Iterator[Callable[[str], None]]:
    """A callback that says, on stderr, what is being done: in place in a terminal, else as plain lines."""
    if not stderr.is_terminal:
        yield note
        return
    with stderr.status("starting") as status:
        yield status.update


def _reporter(bars: Progress) -> Report:
    """One bar per thing. A thing without parts ends where the next one begins."""
    tasks: dict[str, TaskID] = {}
    whole: set[str] = set()

    def report(what: str, done: int, total: int | None) -> None:
        if what not in tasks:
            for other in whole:
                bars.update(tasks[other], visible=False)
            tasks[what] = bars.add_task(escape(what), total=total)
        if total is None:
            whole.add(what)
        bars.update(tasks[what], completed=done, total=total)

    return report


def note(text: str) -> None:
    """A dim line on stderr, beside the answers on stdout."""
    _print(escape(text), "dim")


def complain(text: str) -> None:
    _print(escape(text), "red")


class Wrapped:
    """Writes a text as it comes, breaking lines that are too long between words; longer words are left to the terminal.

    Args:
        write: takes pieces of the text.
        width: cells of a line.
    """

    def __init__(self, write: Callable[[str], object], width: int) -> None:
        self._write = write
        self._width = width
        self._column = 0
        self._gap = ""  # blanks before the word
        self._word = ""

    def push(self, text: str) -> None:
        """More of the text. Its last word is held back until it is complete."""
        for char in text:
            if char == "\n":
                self.flush()
                self._write("\n")
                self._column = 0
            elif char in " \t":
                if self._word:
                    self.flush()
                self._gap += char
            else:
                self._word += char

    def flush(self) -> None:
        """Write what was held back."""
        width = cell_len(self._word)
        if self._column and self._column + len(self._gap) + width > self._width:
            self._write("\n" + self._word)
            self._column = width
        else:
            self._write(self._gap + self._word)
            self._column += len(self._gap) + width
        self._gap = self._word = ""


def print_pieces(pieces: Iterable[str]) -> str:
    """Print a text to stdout as it is made -> all of it. Ctrl-C, or a circle that it goes in, stops it there. In a
    terminal, words stay whole."""
    wrapped = Wrapped(sys.stdout.write, stdout.width) if stdout.is_terminal else None
    text = ""
    try:
        for piece in pieces:
            text += piece
            (wrapped.push if wrapped else sys.stdout.write)(piece)
            sys.stdout.flush()
        stopped = ""
    except KeyboardInterrupt:
        stopped = "(stopped)"
    except Circling as circling:
        stopped = str(circling)
    if wrapped:
        wrapped.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    if stopped:
        note(stopped)
    return text


@dataclass(frozen=True)
class AnswerCost:
    """An answer and what it cost; None = not known.

    Attributes:
        reason: how it ended: stop, length, or abort.
        prompt_tokens, cached_tokens: of the conversation it answers, and how many of them came from the cache.
        tokens: of the answer.
        ttft, tpot: seconds.
    """

    text: str
    reason: str
    prompt_tokens: int | None
    cached_tokens: int | None
    tokens: int
    ttft: float | None
    tpot: float | None

    @classmethod
    def of(cls, completion: Completion) -> AnswerCost:
        choice = completion.choices[0]
        reason = choice.finish.reason if choice.finish else "abort"
        cached, tokens = completion.cached_tokens, len(choice.tokens)
        return cls(choice.text, reason, completion.prompt_tokens, cached, tokens, choice.ttft, choice.tpot)


def cost_table(answer: AnswerCost, memory: MemoryPlan | None = None) -> None:
    """TTFT, TPOT, tokens/s and cache use of an answer."""
    prompt, cached = answer.prompt_tokens or 0, answer.cached_tokens or 0
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("TTFT", _ms(answer.ttft), f"{prompt} prompt tokens, {cached} from the cache")
    rate = f"{1 / answer.tpot:.1f} tokens/s, " if answer.tpot else ""
    table.add_row("TPOT", _ms(answer.tpot), f"{rate}{answer.tokens} tokens, ended by {answer.reason}")
    if memory is not None:
        blocks = -(-(prompt + answer.tokens) // memory.block_size)
        pool = f"of {memory.block_size} tokens; {min(memory.blocks)} in the pool"
        table.add_row("KV cache", f"{blocks} blocks", pool)
    stderr.print(table)
    if total := prompt + answer.tokens:
        parts = (("#", cached), ("=", prompt - cached), ("+", answer.tokens))
        bar = "".join(sign * round(BAR * tokens / total) for sign, tokens in parts)
        note(f"[{bar}] # cached, = computed, + answered")


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f} ms"
