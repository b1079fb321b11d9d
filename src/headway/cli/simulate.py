"""`headway simulate`: traffic through the scheduler that serves, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli import options
from headway.core.options import declared
from headway.simulate.deploy import EngineSetup
from headway.simulate.traffic import Traffic

if TYPE_CHECKING:
    from headway.simulate.outcome import Mixed

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, invoke_without_command=True)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Html = Annotated[Path | None, typer.Option(help="Write a page that opens offline.")]
POLICY = declared(EngineSetup)["policy"].help
IN_FLEET = ("hardware", "gpus", "precision", "kv", "replicas", "router", "most_in_flight", "price")
FROM_OTHERS = ("policy", "ttft_target")  # --policy may name several, --slo has the target


@app.callback()
@options.with_options("traffic", Traffic)
@options.with_options("setup", EngineSetup, *(name for name in declared(EngineSetup) if name not in FROM_OTHERS))
def simulate(
    context: typer.Context,
    traffic: Traffic,
    setup: EngineSetup,
    model: Annotated[
        str, typer.Option("--model", "-m", help="A name of `plan models`, a hub id, a folder, or a .gguf file.")
    ] = "",
    hardware: Annotated[
        str, typer.Option("--hardware", "--device", help="A name of `plan hardware`, or this-machine.")
    ] = "",
    gpus: Annotated[int, typer.Option("--tp", "--gpus", help="Devices of one replica (tensor parallel).")] = 1,
    precision: Annotated[str | None, typer.Option(help="Weights: bf16, fp8, int4...; default: as stored.")] = None,
    kv: Annotated[str | None, typer.Option("--kv", "--kv-precision", help="Cache: bf16, fp8, int8.")] = None,
    replicas: Annotated[int, typer.Option(help="Independent replicas.")] = 1,
    router: Annotated[
        str,
        typer.Option(help="Which replica a request goes to: prefix, session, least-loaded, round-robin, power-of-two."),
    ] = "round-robin",
    most_in_flight: Annotated[
        int | None,
        typer.Option(help="Most requests that a replica has at once; the others wait at the router. Default: any."),
    ] = None,
    fleet: Annotated[
        Path | None,
        typer.Option(help="A TOML file of replicas of several kinds, an autoscaler and failures; see docs/fleet.md."),
    ] = None,
    policy: Annotated[str, typer.Option(help=f"{POLICY} Several with commas are compared.")] = "chunked",
    price: Annotated[float | None, typer.Option(help="Dollars per device and hour; default: catalogued.")] = None,
    slo: Annotated[str, typer.Option(help="Targets per request: ttft=1s,tpot=50ms or e2e=20s.")] = "",
    attainment: Annotated[float, typer.Option(help="Share of requests that must meet all targets.")] = 0.9,
    search: Annotated[
        bool, typer.Option("--search", help="Search the highest rate that meets --slo, or that is kept up with.")
    ] = False,
    as_tool: Annotated[
        str | None, typer.Option("--as", help="Also as vllm, sglang, guidellm or aiperf define it.")
    ] = None,
    json: Json = False,
    csv: Annotated[Path | None, typer.Option(help="Write one row per request.")] = None,
    html: Html = None,
    plot: Annotated[Path | None, typer.Option(help="Write the plots (.svg or .png).")] = None,
    records: Annotated[Path | None, typer.Option(help="Write raw records, for `headway bench view`.")] = None,
) -> None:
    """Play a load through the scheduler that serves, on hardware that need not be there.

    Without --rate, --trace, --log or --concurrency one request is in flight at a time.
    """
    if context.invoked_subcommand is not None:
        return
    from headway.cli.command import command_line
    from headway.cli.terminal import progress
    from headway.engine.references import load_device, load_shape, profile_of
    from headway.metrics.files import Files, to_json
    from headway.metrics.summary import Targets
    from headway.report.document import show
    from headway.simulate.deploy import deployed
    from headway.simulate.outcome import Equal, simulate_all, write

    files = Files(csv, html, records, plot)
    files.check()
    targets, setups = Targets.parse(slo, attainment), _setups(setup, policy, slo)
    systems: Sequence[Equal | Mixed]
    if fleet is not None:
        _only_in_file(context, *IN_FLEET)
        systems = _fleets(fleet, model, setups)
    else:
        device, shape = load_device(_needed("--hardware", hardware)), load_shape(_needed("--model", model))
        profile = profile_of(hardware)
        systems = [
            Equal(
                deployed(shape, device, gpus, one, precision=precision, kv=kv, profile=profile, price=price),
                replicas, router, most_in_flight,
            ) for one in setups
        ]  # fmt: skip
    with progress() as report:
        outcome = simulate_all(systems, traffic, targets if targets.limits else None, as_tool, search, report)
    write(files, outcome, command_line(context))
    if json:
        typer.echo(to_json(outcome.json()))
    else:
        show(outcome.document())


def _fleets(path: Path, model: str, setups: list[EngineSetup]) -> list[Mixed]:
    """The fleet of a file, once for each of these ways to set up its engines."""
    from headway.engine.references import load_device, load_shape, profile_of
    from headway.simulate.fleet_file import read_fleet
    from headway.simulate.outcome import Mixed
    from headway.simulate.play_fleet import kinds_of

    found = []
    for setup in setups:
        file = read_fleet(path, setup)
        shape = load_shape(_needed("--model", model or file.options.model))
        found.append(Mixed(file, kinds_of(file, shape, lambda name: (load_device(name), profile_of(name)))))
    return found


def _only_in_file(context: typer.Context, *names: str) -> None:
    """These are said by the fleet file."""
    from headway.core.errors import BadInput

    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise BadInput("--" + name.replace("_", "-"), "cannot be combined with --fleet: the file says it")


def _setups(setup: EngineSetup, policies: str, slo: str) -> list[EngineSetup]:
    """One for each policy, with the targets that it works for."""
    import msgspec

    from headway.core.slo import parse_slo

    wanted, names = parse_slo(slo), [name.strip() for name in policies.split(",")]
    if setup.step_ms is None and names == ["slo"] and "tpot" in wanted:
        setup = msgspec.structs.replace(setup, step_ms=1e3 * wanted["tpot"])  # so long may a chunk make decodes wait
    return [msgspec.structs.replace(setup, policy=name, ttft_target=wanted.get("ttft")) for name in names]


def _needed(option: str, value: str) -> str:
    from headway.core.errors import BadInput

    if not value:
        raise BadInput(option, "is needed, such as " + ("llama-3.1-8b" if option == "--model" else "h100-sxm"))
    return value


@app.command()
def score(
    run: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="With meta.json, config.json, requests.jsonl, timeseries.csv.")
    ],
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


@app.command("replay")
def played_again(
    log: Annotated[Path, typer.Argument(help="Event log of a server (--event-log).")],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="The model that was served; needed where `headway probe` had been run."),
    ] = None,
    json: Json = False,
) -> None:
    """Feed this version's scheduler what a server's was fed, and say whether it plans the same steps. Exit code 1: it
    does not."""
    from headway.cli.terminal import doing, wrapped
    from headway.core.errors import BadInput
    from headway.engine.event_file import read_header
    from headway.engine.profile import recorded_regimes
    from headway.engine.references import load_shape
    from headway.metrics.files import to_json
    from headway.simulate.replay import replay

    if not log.is_file():
        raise BadInput("LOG", f"no such file: {log}; a server writes one with --event-log")
    header = read_header(log)
    models = [timing.model for timing in recorded_regimes(header, None if model is None else load_shape(model))]
    with doing() as say:
        say("planning every step again")
        first = models[min(header.regime, len(models) - 1)] if models else None
        found = replay(log, first, regimes=models)
    if json:
        typer.echo(to_json({"steps": found.steps, "alike": found.difference is None}))
    elif found.difference is None:
        print(wrapped(f"all {found.steps:,} steps are planned as they were"))
    else:
        print(wrapped(f"step {found.steps:,} is planned otherwise: {found.difference.plan}"))
    if found.difference is not None:
        raise typer.Exit(1)


@app.command()
def spec(
    drafts: Annotated[str, typer.Option(help="Drafts per step, with commas.")] = "2,4,8",
    acceptance: Annotated[str, typer.Option(help="Shares of drafts accepted, with commas.")] = "0.6,0.8,0.9",
    draft_cost: Annotated[float, typer.Option(help="A draft step over a target step.")] = 0.05,
    verification: Annotated[str, typer.Option(help="coupled or rejection.")] = "rejection",
    steps: Annotated[int, typer.Option(help="Steps to play for each line.")] = 50_000,
    seed: Annotated[int, typer.Option(help="Of distributions and noise.")] = 0,
    json: Json = False,
) -> None:
    """Speculative decoding by the code that verifies drafts, on made-up distributions: tokens per step and speed-up."""
    from headway.cli.options import numbers
    from headway.metrics.files import to_json
    from headway.report.document import show
    from headway.simulate.speculation import document, table

    found = table(
        numbers(drafts, "--drafts", int), numbers(acceptance, "--acceptance", float), draft_cost, verification, steps,
        seed,
    )  # fmt: skip
    if json:
        typer.echo(to_json(found))
    else:
        show(document(found))


@app.command()
def lesson(
    name: Annotated[str, typer.Argument(help="batching, memory, long-prompt, frontier or little.")],
    json: Json = False,
    plot: Annotated[Path | None, typer.Option(help="Write the plot (.svg or .png).")] = None,
    html: Html = None,
) -> None:
    """One experiment that shows why engines are built as they are: a table, a plot, and what is seen."""
    from headway.cli.terminal import doing
    from headway.metrics.files import to_json
    from headway.report.document import show, write_page, write_plot
    from headway.report.figures import check_plot
    from headway.report.files import check_writable
    from headway.simulate.lessons import lesson as played

    check_plot(plot)
    check_writable(html, "--html")
    with doing() as say:
        say("simulating")
        found = played(name)
    if plot is not None:
        write_plot(found.document(), plot)
    if html is not None:
        write_page(found.document(), html, f"headway simulate lesson {name}")
    if json:
        typer.echo(to_json(found.json()))
    else:
        show(found.document())
