"""`headway calibrate`: fit this machine's step times to what a server did."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def calibrate(
    log: Annotated[Path, typer.Argument(help="Event log of a server or LLM on this machine (--event-log).")],
    model: Annotated[str, typer.Option("--model", "-m", help="The model that was served: a folder or a .gguf file.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write the profile; default: where the engine looks.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit step times to an event log, say how far off they are on steps left out, and write the profile that serve,
    plan and simulate read."""
    import msgspec

    from headway.core.errors import BadInput
    from headway.engine.build import make_backend
    from headway.engine.event_file import read_header
    from headway.engine.machine import usable_cores
    from headway.engine.profile import held_formats, profile_path, saved_profile
    from headway.engine.references import load_shape
    from headway.measure.formats import measure_machine
    from headway.measure.probe import save_profile
    from headway.measure.served import calibrate as fitted
    from headway.report.document import Document, Grid, Text, show

    if not log.is_file():
        raise BadInput("LOG", f"no such file: {log}; a server writes one with --event-log")
    shape = load_shape(model)
    backend = make_backend(str(read_header(log).config.get("backend", "native")), usable_cores())
    profile = saved_profile() or measure_machine(usable_cores())
    found = fitted(log, shape, profile, backend.math, held_formats(shape, backend))
    path = output or profile_path()
    save_profile(found.profile, path)
    if json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    rows = [
        [one.kind, str(one.steps), f"{one.median:.1%}", f"{one.p90:.1%}", f"{one.bias:+.1%}"] for one in found.held_out
    ]
    steps = sum(one.steps for one in found.fits)
    show(
        Document(f"{shape.name}, {found.backend} backend, {', '.join(found.formats)}: fitted on {steps} steps", [
            Grid(["steps left out of a fit", "number", "median error", "p90", "bias"], rows),
            Text(f"written to {path}"),
        ])
    )  # fmt: skip
