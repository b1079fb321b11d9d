"""`headway simulate`: traffic through the scheduler that serves, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def score(
    run: Annotated[Path, typer.Argument(help="Folder: meta.json, config.json, requests.jsonl, timeseries.csv.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Its shape, where meta.json's name is not known.")
    ] = None,
    json: Json = False,
) -> None:
    """Simulate a measured run of vLLM, and say how far off TTFT, TPOT, E2E, ITL and the queue are."""
    from headway.cli.terminal import progress
    from headway.engine.references import load_shape
    from headway.metrics.files import to_json
    from headway.report.document import show
    from headway.simulate.measured import model_named
    from headway.simulate.score import document
    from headway.simulate.score import score as scored

    shape = load_shape(model or model_named(run))
    with progress() as report:
        found = scored(run, shape, lambda done, of: report("simulating and fitting", done, of))
    if json:
        typer.echo(to_json(found))
    else:
        show(document(found))
