"""`headway doctor`: what this machine has, and how fast a model should run on it."""

from __future__ import annotations

from typing import Annotated

import typer

from headway.cli import options
from headway.engine.options import EngineOptions

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@options.with_engine("model", "threads", "backend")
def doctor(
    engine: EngineOptions,
    context: Annotated[int, typer.Option(help="Tokens of context per request in the prediction.")] = 512,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Run a few real steps beside the predictions.")
    ] = True,
    quick: options.Quick = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Instruction sets, cores, memory, measured bandwidth and arithmetic; predicted and measured tokens per second.

    Takes half a minute, and ten seconds more for each weight format that `headway probe` has not timed here. Where a
    busy machine takes three times as long, the rest is left out. What was measured for the first time is kept as
    `headway probe` keeps it, so that engines predict their steps by it and the next run is quicker."""
    from headway.cli.terminal import note, progress, wrapped
    from headway.measure.checkup import checkup
    from headway.measure.synthetic import QUICK_ROUNDS, ROUNDS

    note("this takes about half a minute, on a busy machine more" + ("" if quick else "; --quick is quicker"))
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with progress() as show:
        report = checkup(engine.model, context, engine.threads, engine.backend, measure, rounds, show)
    if json:
        import msgspec

        print(msgspec.json.encode(report).decode())
        return
    for label, text in report.lines():
        print(wrapped(f"{label:<20} {text}", 21))
