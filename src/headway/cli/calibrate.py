"""`headway calibrate`: fit this machine's step times to what a server did."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headway.measure.served import CalibratedProfile, Window
    from headway.report.document import Document

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def calibrate(
    log: Annotated[Path, typer.Argument(help="Event log of a server or LLM on this machine (--event-log).")],
    model: Annotated[str, typer.Option("--model", "-m", help="The model that was served: a folder or a .gguf file.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write the profile; default: where the engine looks.")
    ] = None,
    url: Annotated[
        str, typer.Option("--url", help="First play loads of many sizes against the server that writes LOG.")
    ] = "",
    seconds: Annotated[float, typer.Option("--seconds", help="How long to play them.")] = 120.0,
    force: Annotated[
        bool, typer.Option("--force", help="Write the profile although it predicts badly, or contradicts itself.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Fit step times to an event log, say how far off they are on steps left out, and write the profile that serve,
    plan and simulate read."""
    import msgspec

    from headway.core.errors import BadInput, HeadwayError
    from headway.engine.backends import make_backend
    from headway.engine.event_file import read_header
    from headway.engine.machine import usable_cores
    from headway.engine.profile import held_formats, profile_path, saved_profile
    from headway.engine.references import load_shape
    from headway.measure.doubts import calibration_doubts
    from headway.measure.formats import measure_machine
    from headway.measure.probe import save_profile
    from headway.measure.served import calibrate as fitted
    from headway.report.document import show

    if not log.is_file():
        raise BadInput("LOG", f"no such file: {log}; a server writes one with --event-log")
    shape = load_shape(model)
    backend = make_backend(str(read_header(log).config.get("backend", "native")), usable_cores())
    profile = saved_profile() or measure_machine(usable_cores())
    windows = _exercised(url, seconds, backend.math) if url else None
    found = fitted(log, shape, profile, backend.math, held_formats(shape, backend), windows)
    if json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        show(_document(shape.name, found))
    if (reasons := calibration_doubts(found)) and not force:
        raise HeadwayError(
            f"nothing was saved: {'; '.join(reasons)}. Record a log on a quiet machine, with the model alone on it, or "
            "write it with --force"
        )
    path = output or profile_path()
    save_profile(found.profile, path)
    if not json:
        print(f"written to {path}")


def _exercised(url: str, seconds: float, math: str) -> list[Window]:
    """Loads were played against a server of ours on this machine."""
    import asyncio
    import os

    from headway.bench.client import Endpoint
    from headway.bench.exercise import CELLS, exercise
    from headway.cli.terminal import progress
    from headway.core.errors import BadInput
    from headway.engine.machine import usable_cores
    from headway.measure.formats import machine_probe

    if not 2 * len(CELLS) <= seconds <= 3600:
        raise BadInput("--seconds", f"{seconds:g} is not a number from {2 * len(CELLS)} to 3600")
    endpoint = Endpoint.parse(
        url, "completions", key=os.environ.get("HEADWAY_API_KEY", ""), extra='{"ignore_eos": true}'
    )
    with progress() as report:
        return asyncio.run(
            exercise(
                endpoint, seconds, machine_probe(usable_cores(), math), lambda n, of: report("playing loads", n, of)
            )
        )


def _document(model: str, found: CalibratedProfile) -> Document:
    from headway.report.document import Document, Grid

    steps = sum(one.steps for one in found.fits)
    rows = [
        [one.kind, str(one.steps), f"{one.median:.1%}", f"{one.p90:.1%}", f"{one.bias:+.1%}"] for one in found.held_out
    ]
    head = ["steps left out of a fit", "number", "median error", "p90", "bias"]
    title = f"{model}, {found.backend} backend, {', '.join(found.formats)}: fitted on {steps} steps"
    return Document(title, [Grid(head, rows)])
