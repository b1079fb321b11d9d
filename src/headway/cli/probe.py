"""`headway probe`: measure this machine, for the step-time model to use in place of a catalogued device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli import options
from headway.engine.options import EngineOptions

if TYPE_CHECKING:
    from headway.measure.probe import Knee
    from headway.report.document import Document
    from headway.roofline.profile import Profile

app = typer.Typer(
    help="Measure this machine: bandwidth by threads, arithmetic rates, and where the two branches of a step meet.",
    invoke_without_command=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip
MACHINE_SECONDS = 5.0  # of memory and arithmetic
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
@options.with_engine("threads", "backend")
def probe(
    context: typer.Context,
    engine: EngineOptions,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write the profile; default: where the engine looks.")
    ] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            "--formats",
            help="Weight formats to fit steps on, with commas, like q4_0,bf16,int8/128 (a target of --weights and its "
            "group); none = only rates. Default: the usual ones.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write the profile although the machine was busy, or contradicts itself.")
    ] = False,
    quick: options.Quick = False,
    json: Json = False,
) -> None:
    """Read bandwidth by number of threads, arithmetic rate by number format, and what Headway's own steps reach of
    them in each weight format: about ten seconds per format. Where a busy machine takes three times as long, the rest
    is left out."""
    if context.invoked_subcommand is not None:
        return
    import msgspec

    from headway.cli.terminal import note, progress
    from headway.core.errors import HeadwayError
    from headway.engine.backends import make_backend
    from headway.engine.machine import usable_cores
    from headway.engine.profile import profile_path
    from headway.measure.doubts import WAITING, Waiting, doubts
    from headway.measure.formats import USUAL, fit_formats, machine_probe, measure_machine
    from headway.measure.patience import Patience
    from headway.measure.probe import save_profile
    from headway.measure.synthetic import QUICK_ROUNDS, ROUNDS, SECONDS, steps
    from headway.report.document import show
    from headway.report.units import duration

    cores = engine.threads or usable_cores()
    made = make_backend(engine.backend, cores)
    kind, math = made.name, made.math
    usual = USUAL if kind == "native" else ("f32",)
    wanted = usual if formats is None else () if formats == "none" else tuple(dict.fromkeys(formats.split(",")))
    rounds = QUICK_ROUNDS if quick else ROUNDS
    seconds = MACHINE_SECONDS + len(wanted) * steps(rounds) * SECONDS
    note(f"this takes about {duration(seconds)} on an idle machine" + ("" if quick else "; --quick is quicker"))
    waiting, patience = Waiting(), Patience(seconds)
    with progress() as report:
        report("measuring memory and arithmetic", 0, None)
        profile = measure_machine(cores)
        look = machine_probe(cores, math)
        before = look()
        if waiting.share() > WAITING:
            note("other programs are running: this takes longer, and may end with nothing to save")
        profile = fit_formats(profile, kind, wanted, report, rounds, patience)
    fitted = profile.fits.get(kind, {})
    reasons = doubts(profile, wanted, kind, waiting.share(), (before, look()))
    if missing := [name for name in wanted if name not in fitted]:
        reasons.append(patience.sentence(", ".join(missing)))
    if json:
        print(msgspec.json.format(msgspec.json.encode(profile)).decode())
    else:
        show(_document(profile))
    if reasons and not force:
        raise HeadwayError(f"nothing was saved: {'; '.join(reasons)}. Try again on a quiet machine, or with --force")
    path = output or profile_path()
    save_profile(profile, path)
    if not json:
        print(f"written to {path}")


@app.command("knee")
def knee(
    width: Annotated[int, typer.Option("--width", help="Of the square linear layer.")] = 4096,
    batches: Annotated[str, typer.Option("--batches", help="Batch sizes.")] = "1,2,4,8,16,32,64,128,256,512,1024",
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw to this .png or .svg file.")] = None,
    json: Json = False,
) -> None:
    """Time one linear layer for growing batches: flat while its weights stream, then in proportion to the batch."""
    from headway.cli.terminal import doing
    from headway.core.errors import BadInput
    from headway.measure.probe import measure_knee
    from headway.report.figures import check_plot

    check_plot(plot)
    try:
        sizes = [int(part) for part in batches.split(",")]
    except ValueError:
        raise BadInput("--batches", f"{batches!r}; accepted: whole numbers with commas, like 1,8,64") from None
    with doing() as say:
        say("timing the layer")
        found = measure_knee(width, sizes)
    if plot is not None:
        from headway.measure.probe import draw_knee
        from headway.report.figures import new_figure, save_figure

        figure, axes = new_figure()
        draw_knee(axes, found)
        save_figure(figure, plot)
    if json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        _print_knee(found)


def _document(profile: Profile) -> Document:
    from headway.report.document import Document, Grid, Text

    reading = [[f"reading, {threads} threads", f"{rate / 1e9:.1f} GB/s", ""]
               for threads, rate in profile.read_bandwidth.items()]  # fmt: skip
    arithmetic = [[f"arithmetic, {name}", f"{rate / 1e9:.1f} GFLOP/s", f"{rate / profile.bandwidth:.1f}"]
                  for name, rate in profile.rates.items()]  # fmt: skip
    steps = [
        [
            f"{backend}, {format}", str(fit.steps), f"{fit.bandwidth[1] / 1e9:.0f}", f"{fit.error:.1%}",
            f"{fit.low - 1:+.0%} to {fit.high - 1:+.0%}", f"{fit.efficiency.stream:.0%}",
            _gb_s(fit.efficiency.ceiling), f"{fit.efficiency.linear:.0%} of {fit.math}",
        ]
        for backend, fits in profile.fits.items() for format, regimes in fits.items() for fit in regimes
    ]  # fmt: skip
    head = ["steps", "timed", "at GB/s", "error", "80 % within", "reads", "at most GB/s", "multiplies at"]
    return Document(f"{profile.name}: {profile.threads} threads, {profile.memory / 2**30:.1f} GiB free", [
        Grid(["", "rate", "FLOPs per byte"], [*reading, *arithmetic]),
        *([Grid(head, steps)] if steps else [Text("no steps were timed: predictions are bounds", "note")]),
    ])  # fmt: skip


def _gb_s(rate: float | None) -> str:
    return "" if rate is None else f"{rate / 1e9:.0f}"


def _print_knee(found: Knee) -> None:
    longest = max(point.seconds for point in found.points)
    print(f"one {found.width} x {found.width} float32 layer, {4 * found.width**2 / 1e6:.0f} MB of weights")
    for point in found.points:
        bar = "#" * max(1, round(40 * point.seconds / longest))
        print(f"  batch {point.batch:>5}  {point.seconds * 1e3:9.2f} ms  {point.rows_per_second:10,.0f} rows/s  {bar}")
    print(
        f"flat branch {found.weight_seconds * 1e3:.2f} ms, rising branch {found.row_seconds * 1e6:.1f} us per row: "
        f"they meet at batch {found.batch:.0f}"
    )


if __name__ == "__main__":
    app()
