"""The terminal view of a run in progress: how far it is, what fails, and the latencies so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headway.metrics.records import RequestRecord
from headway.metrics.stats import percentile
from headway.report.progress import PlainProgress

RECENT = 100  # requests whose median is shown beside that of all
BARS = " ▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The last `width` values as a row of bars, scaled to their maximum."""
    shown = values[-width:]
    top = max(shown, default=0.0)
    return "".join(BARS[min(8, round(8 * value / top))] for value in shown) if top > 0 else ""


def frame(finished: Sequence[RequestRecord], in_flight: int, total: int, note: str = "") -> Table:
    """One picture of the run; `note`: the last thing that was announced."""
    grid = Table.grid(padding=(0, 2))
    if note:
        grid.add_row("now", Text(note), "")
    if total:
        bar = ProgressBar(total=total, completed=len(finished), width=40)
        grid.add_row("requests", bar, f"{len(finished)} of {total}")
    grid.add_row("in flight", str(in_flight), "")
    for label, name in (("TTFT ms", "ttft_ms"), ("TPOT ms", "tpot_ms")):
        values = [value for record in finished if (value := getattr(record, name)) is not None]
        if values:
            text = f"p50 {percentile(values, 0.5):.1f}, last {RECENT}: {percentile(values[-RECENT:], 0.5):.1f}"
            grid.add_row(label, sparkline(values), text)
    failures = Counter(record.failure.kind.value for record in finished if record.failure is not None)
    for kind, count in failures.items():
        grid.add_row("[red]failed[/red]", kind, str(count))
    return grid


class LiveView:
    """Use as a context manager; call it as `progress` of a run, and its `announce` with what happens meanwhile.

    On a terminal everything is drawn in place and gone at the end. Elsewhere how far the run is is a line of stderr now
    and then, unless `quiet`; with `verbose` announcements are lines of it everywhere.
    """

    def __init__(self, verbose: bool = False, quiet: bool = False) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._verbose = verbose
        self._plain = None if quiet or self._console.is_terminal else PlainProgress(self._console)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._shown: tuple[Sequence[RequestRecord], int, int] = ((), 0, 0)
        self._note = ""

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def __call__(self, finished: Sequence[RequestRecord], in_flight: int, total: int) -> None:
        self._shown = (finished, in_flight, total)
        if self._plain and total:
            self._plain("requests", len(finished), total)
        self._draw()

    def announce(self, text: str) -> None:
        if self._verbose:
            self._console.print(Text(text), soft_wrap=True)
        self._note = text
        self._draw()

    def _draw(self) -> None:
        if self._console.is_terminal:
            self._live.update(frame(*self._shown, self._note), refresh=True)
