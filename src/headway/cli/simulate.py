"""`headway simulate`: traffic through the scheduler that serves, in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, invoke_without_command=True)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.callback()
def simulate(
    context: typer.Context,
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
    route: Annotated[str, typer.Option(help="Which replica a request goes to: round-robin or least-loaded.")] = (
        "round-robin"
    ),
    policy: Annotated[str, typer.Option(help="Of the scheduler; several with commas are compared.")] = "chunked",
    requests: Annotated[int, typer.Option(help="Requests to simulate.")] = 1000,
    rate: Annotated[float | None, typer.Option(help="Open loop: arrivals per second.")] = None,
    arrival: Annotated[str, typer.Option(help="poisson, constant or gamma.")] = "poisson",
    burstiness: Annotated[float, typer.Option(help="Of gamma arrivals: 1 = Poisson, below 1 = bursts.")] = 1.0,
    concurrency: Annotated[int | None, typer.Option(help="Closed loop: requests in flight.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Azure .csv or Mooncake .jsonl; with --rate only its lengths and prefixes.")
    ] = None,
    log: Annotated[Path | None, typer.Option(help="The event log of a server: its requests, as a trace.")] = None,
    speed: Annotated[float, typer.Option(help="Replay a trace this many times faster.")] = 1.0,
    length_scale: Annotated[float, typer.Option(help="Multiply a trace's lengths.")] = 1.0,
    turns: Annotated[int, typer.Option(help="Turns of a conversation, each with all that was said before.")] = 1,
    think: Annotated[float, typer.Option(help="Mean seconds between an answer and what follows it.")] = 0.0,
    input_tokens: Annotated[int, typer.Option(help="Mean tokens of prompts.")] = 256,
    output_tokens: Annotated[int, typer.Option(help="Mean tokens of answers; the scheduler is not told.")] = 64,
    input_cv: Annotated[float, typer.Option(help="Coefficient of variation of prompt lengths; 0 = all equal.")] = 0.0,
    output_cv: Annotated[float, typer.Option(help="The same of answers.")] = 0.0,
    shared_prefix: Annotated[int, typer.Option(help="Prompt tokens equal in all prompts.")] = 0,
    max_tokens: Annotated[int | None, typer.Option(help="What clients ask for at most; default: the context.")] = None,
    max_rows: Annotated[int | None, typer.Option(help="Most requests in one step.")] = None,
    max_step_tokens: Annotated[int | None, typer.Option(help="Most new tokens in one step.")] = None,
    step_ms: Annotated[float | None, typer.Option(help="Longest step in ms that a prompt chunk may cause.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest context.")] = None,
    memory: Annotated[str, typer.Option(help="paged, or contiguous: the longest context reserved for all.")] = "paged",
    block_size: Annotated[int, typer.Option(help="Tokens per cache block.")] = 32,
    kv_cache_gib: Annotated[float | None, typer.Option(help="GiB for the KV cache of each device.")] = None,
    prefix_cache: Annotated[bool, typer.Option(help="Keep finished prefixes.")] = True,
    prefix_ttl: Annotated[float, typer.Option(help="Seconds after which an unused prefix is forgotten.")] = 1800.0,
    max_wait: Annotated[float | None, typer.Option(help="Most seconds a request waits for its turn.")] = None,
    host_us: Annotated[float, typer.Option(help="Microseconds per step outside of the step-time model.")] = 0.0,
    price: Annotated[float | None, typer.Option(help="Dollars per device and hour; default: catalogued.")] = None,
    slo: Annotated[str, typer.Option(help="Targets per request: ttft=1s,tpot=50ms or e2e=20s.")] = "",
    attainment: Annotated[float, typer.Option(help="Share of requests that must meet all targets.")] = 0.9,
    search: Annotated[
        bool, typer.Option("--search", help="Search the highest rate that meets --slo, or that is kept up with.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of lengths and arrivals.")] = 0,
    as_tool: Annotated[
        str | None, typer.Option("--as", help="Also as vllm, sglang, guidellm or aiperf define it.")
    ] = None,
    json: Json = False,
    csv: Annotated[Path | None, typer.Option(help="Write one row per request.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page that opens offline.")] = None,
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
    from headway.core.slo import parse_slo
    from headway.engine.references import load_device, load_shape, profile_of
    from headway.metrics.files import Files, to_json
    from headway.metrics.summary import Targets
    from headway.report.document import show
    from headway.simulate.arrivals import Lengths
    from headway.simulate.deploy import EngineSetup, deployed
    from headway.simulate.outcome import simulate_all, write
    from headway.simulate.traffic import Traffic

    traffic = Traffic(
        lengths=Lengths(input_tokens, output_tokens, input_cv, output_cv, shared_prefix, max_tokens),
        requests=requests, rate=rate, arrival=arrival, burstiness=burstiness, concurrency=concurrency, trace=trace,
        log=log, speed=speed, length_scale=length_scale, turns=turns, think=think, seed=seed,
    )  # fmt: skip
    files = Files(csv, html, records, plot)
    files.check()
    targets = Targets.parse(slo, attainment)
    device, shape = load_device(_needed("--hardware", hardware)), load_shape(_needed("--model", model))
    profile = profile_of(hardware)
    wanted = parse_slo(slo)
    names = [name.strip() for name in policy.split(",")]
    if step_ms is None and names == ["slo"] and "tpot" in wanted:
        step_ms = 1e3 * wanted["tpot"]  # so long may a chunk make decodes wait
    setups = [
        EngineSetup(
            name, max_rows, max_step_tokens, step_ms, max_model_len, memory, block_size, kv_cache_gib,
            prefix_cache, prefix_ttl, max_wait, host_us, wanted.get("ttft"),
        )
        for name in names
    ]  # fmt: skip
    ready = [
        deployed(shape, device, gpus, setup, precision=precision, kv=kv, profile=profile, price=price)
        for setup in setups
    ]
    with progress() as report:
        outcome = simulate_all(
            ready, traffic, replicas, route, targets if targets.limits else None, as_tool, search, report
        )
    write(files, outcome, command_line(context))
    if json:
        typer.echo(to_json(outcome.json()))
    else:
        show(outcome.document())


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
    html: Annotated[Path | None, typer.Option(help="Write a page that opens offline.")] = None,
) -> None:
    """One experiment that shows why engines are built as they are: a table, a plot, and what is seen."""
    from headway.cli.terminal import doing
    from headway.metrics.files import to_json
    from headway.report.document import show, write_page, write_plot
    from headway.report.figures import check_plot, need_plots
    from headway.report.files import check_writable
    from headway.simulate.lessons import lesson as played

    check_plot(plot)
    check_writable(html, "--html")
    if html is not None:
        need_plots("--html")
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
