"""`headway receipts`: who used the machine, from an event log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headway.engine.invoice import Invoice
    from headway.report.document import Document

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
MOST_LINES = 40  # of a table in a terminal; --json has all


@app.command()
def receipts(
    log: Annotated[Path, typer.Argument(help="Event log of a server (--event-log).")],
    price: Annotated[float | None, typer.Option(help="Dollars per hour of the machine.")] = None,
    by: Annotated[str, typer.Option(help="One line per: tenant or request.")] = "tenant",
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="The model that was served; needed where `headway probe` had been run."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, every line.")] = False,
) -> None:
    """Share the measured time of every step among its requests. Their receipts and the idle time are the wall time."""
    import msgspec

    from headway.core.errors import BadInput
    from headway.engine.invoice import invoice
    from headway.engine.references import load_shape
    from headway.report.document import show

    if by not in ("tenant", "request"):
        raise BadInput("--by", f"{by!r}; accepted: tenant, request")
    if not log.is_file():
        raise BadInput("LOG", f"no such file: {log}; a server writes one with --event-log")
    found = invoice(log, price, by == "request", None if model is None else load_shape(model))
    if json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        show(_document(log.name, found, by))


def _document(name: str, found: Invoice, by: str) -> Document:
    from headway.report import units
    from headway.report.document import Document, Grid, Part, Text

    of_many = by == "tenant"
    figures = ["prompt", "cached", "answer", "prefill", "decode", "stalls", "queue", "machine", "share"]
    head = [by, *(["requests"] if of_many else []), *figures]
    rows = [
        [
            line.name, *([str(line.requests)] if of_many else []), str(line.prompt_tokens), str(line.cached_tokens),
            str(line.generated_tokens),
            *map(units.seconds, (line.prefill, line.decode, line.stalls, line.queue, line.seconds)),
            f"{line.seconds / found.wall:.1%}" if found.wall else "-",
            *([] if line.dollars is None else [f"${line.dollars:.6f}"]),
        ]
        for line in found.lines[:MOST_LINES]
    ]  # fmt: skip
    idle = f"idle {units.seconds(found.idle)} of {units.seconds(found.wall)}"
    if found.dollars is not None and found.idle_dollars is not None:
        head.append("cost")
        idle += f", ${found.idle_dollars:.6f} of ${found.dollars:.6f}"
    parts: list[Part] = [
        Grid(head, rows),
        Text(f"{idle}; steps are shared by {found.shares}"),
        Text("stalls: what its steps took longer because others had work in them; not billed", "note"),
    ]
    if of_many:
        parts.append(
            Text("tenants: API keys, numbered as the log met them, for it holds none; without keys all are 0", "note")
        )
    if len(found.lines) > MOST_LINES:
        parts.append(Text(f"{len(found.lines) - MOST_LINES} smaller lines are left out; --json has them", "note"))
    if found.open:
        parts.append(Text(f"{found.open} choices had not ended when the log did", "note"))
    return Document(f"{name}: who used the machine", parts)
