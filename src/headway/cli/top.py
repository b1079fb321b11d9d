"""`headway top`: a running server, in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli import options

if TYPE_CHECKING:
    from rich.table import Table

    from headway.client.watch import View

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
BAR = 30  # characters of the cache bar
HISTORY = 60  # readings of a sparkline
MOST_KEYS = 5
ROUTER = "headway:router_requests_waiting"  # a series that only routers have
SPARKS = "▁▂▃▄▅▆▇█"


@app.command()
def top(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    api_key_file: options.ApiKeyFile = None,
    interval: Annotated[float, typer.Option(help="Seconds between two readings.", min=0.1)] = 1.0,
    window: Annotated[int, typer.Option(help="Readings the rates look back over.", min=1)] = 10,
    once: Annotated[bool, typer.Option("--once", help="Print one reading and leave.")] = False,
) -> None:
    """Running, waiting, tokens/s, cache use, how long tokens take, who uses it; and their course. Ctrl-C leaves."""
    import sys
    import time
    from collections import deque
    from contextlib import suppress

    from rich.console import Console
    from rich.live import Live

    from headway.client.chat import Client
    from headway.client.watch import Scrape, parse, view
    from headway.core.errors import BadInput

    client = Client(url, options.api_key(api_key_file), timeout=10)
    scrapes: deque[Scrape] = deque(maxlen=window + 1)
    history: deque[View] = deque(maxlen=HISTORY)  # from one reading to the next

    def read() -> Table:
        scrapes.append(parse(client.metrics(), time.monotonic()))
        if ROUTER in scrapes[-1].values:
            raise BadInput(
                "--url", f"{url} is a router: its replicas are what can be watched, {url}/replicas lists them"
            )
        if len(scrapes) > 1:
            history.append(view(scrapes[-2], scrapes[-1]))
        return table(view(scrapes[0], scrapes[-1]), scrapes[-1].at - scrapes[0].at, history)

    console = Console()
    read()
    with suppress(KeyboardInterrupt):  # the way to leave
        if once or not console.is_terminal:  # without a terminal: one reading after the other
            while True:
                time.sleep(interval)
                console.print(read())
                sys.stdout.flush()
                if once:
                    return
        with Live(read(), console=console, refresh_per_second=4) as live:
            while True:
                time.sleep(interval)
                live.update(read())


def table(now: View, seconds: float, history: Sequence[View] = ()) -> Table:
    """A view as rows of text, with what it was before."""
    from rich.table import Table

    full = round(now.kv_usage * BAR)
    rows = Table(
        title=f"{now.model or 'server'}: last {seconds:.0f} s", show_header=False, box=None, padding=(0, 2, 0, 0)
    )
    lines = {
        "requests": f"{now.running} running, {now.waiting} waiting, {now.finished} finished",
        "tokens/s": f"{now.output_rate:.1f} out, {now.prompt_rate:.1f} prompt",
        "KV cache": f"[{'#' * full}{'.' * (BAR - full)}] {now.kv_usage:.1%}".replace("[", r"\["),
    }
    courses: tuple[list[float], ...] = (
        [one.running for one in history],
        [one.output_rate for one in history],
        [one.kv_usage for one in history],
    )
    for (label, line), course in zip(lines.items(), courses, strict=True):
        rows.add_row(label, line, spark(course, 1.0 if label == "KV cache" else None))
    rows.add_row("prefix hits", "-" if now.hit_share != now.hit_share else f"{now.hit_share:.1%} of prompt tokens")
    for label, values in (("TTFT", now.ttft), ("between tokens", now.itl)):
        rows.add_row(label, "  ".join(f"p{p} {_ms(value)}" for p, value in zip((50, 90, 99), values, strict=True)))
    if now.step_ratio == now.step_ratio:
        doubt = "; [red]the machine has changed: `headway probe` measures it anew[/red]" if now.outside else ""
        off = f", {now.step_error:.0%} off" if now.step_error == now.step_error else ""
        rows.add_row("step times", f"{now.step_ratio:.2f} of predicted{off}{doubt}")
    if len(now.keys) > 1:
        most = ", ".join(f"{key[:8]} {share:.0%}" for key, share in now.keys[:MOST_KEYS])
        rows.add_row("used by", most + (f", {len(now.keys) - MOST_KEYS} more" if len(now.keys) > MOST_KEYS else ""))
    return rows


def spark(course: Sequence[float], most: float | None = None) -> str:
    """Figures over time as one line of bars, the newest last; the highest is `most`, or the largest of them."""
    top = max(course, default=0.0) if most is None else most
    if top <= 0:
        return SPARKS[0] * len(course)
    return "".join(SPARKS[min(len(SPARKS) - 1, int(len(SPARKS) * figure / top))] for figure in course)


def _ms(seconds: float) -> str:
    """A bucket's upper end."""
    if seconds != seconds:
        return "-"
    return "> 300 s" if seconds == float("inf") else f"<= {seconds * 1000:g} ms"
