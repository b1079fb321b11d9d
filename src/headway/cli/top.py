"""`headway top`: a running server, in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli import options

if TYPE_CHECKING:
    from rich.table import Table

    from headway.client.watch import View

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
BAR = 30  # characters of the cache bar


@app.command()
def top(
    url: Annotated[str, typer.Option(help="The server.")] = "http://127.0.0.1:8000",
    api_key_file: options.ApiKeyFile = None,
    interval: Annotated[float, typer.Option(help="Seconds between two readings.", min=0.1)] = 1.0,
    window: Annotated[int, typer.Option(help="Readings the rates look back over.", min=1)] = 10,
    once: Annotated[bool, typer.Option("--once", help="Print one reading and leave.")] = False,
) -> None:
    """Running, waiting, tokens/s, cache use, and how long tokens take. Ctrl-C leaves."""
    import sys
    import time
    from collections import deque
    from contextlib import suppress

    from rich.console import Console
    from rich.live import Live

    from headway.client.chat import Client
    from headway.client.watch import Scrape, parse, view

    client = Client(url, options.api_key(api_key_file), timeout=10)
    scrapes: deque[Scrape] = deque(maxlen=window + 1)

    def read() -> Table:
        scrapes.append(parse(client.metrics(), time.monotonic()))
        return table(view(scrapes[0], scrapes[-1]), scrapes[-1].at - scrapes[0].at)

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


def table(now: View, seconds: float) -> Table:
    """A view as rows of text."""
    from rich.table import Table

    full = round(now.kv_usage * BAR)
    rows = Table(
        title=f"{now.model or 'server'}: last {seconds:.0f} s", show_header=False, box=None, padding=(0, 2, 0, 0)
    )
    rows.add_row("requests", f"{now.running} running, {now.waiting} waiting, {now.finished} finished")
    rows.add_row("tokens/s", f"{now.output_rate:.1f} out, {now.prompt_rate:.1f} prompt")
    rows.add_row("KV cache", f"[{'#' * full}{'.' * (BAR - full)}] {now.kv_usage:.1%}".replace("[", r"\["))
    rows.add_row("prefix hits", "-" if now.hit_share != now.hit_share else f"{now.hit_share:.1%} of prompt tokens")
    for label, values in (("TTFT", now.ttft), ("between tokens", now.itl)):
        rows.add_row(label, "  ".join(f"p{p} {_ms(value)}" for p, value in zip((50, 90, 99), values, strict=True)))
    if now.step_ratio == now.step_ratio:
        doubt = "; [red]the machine has changed: `headway probe` measures it anew[/red]" if now.outside else ""
        rows.add_row("step times", f"{now.step_ratio:.2f} of predicted{doubt}")
    return rows


def _ms(seconds: float) -> str:
    """A bucket's upper end."""
    if seconds != seconds:
        return "-"
    return "> 300 s" if seconds == float("inf") else f"<= {seconds * 1000:g} ms"
