"""`headway bench`: measure any OpenAI- or Anthropic-style endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headway.bench.options import LoadOptions, Workload
from headway.cli import options
from headway.cli.command import command_line
from headway.core.options import declared

app = typer.Typer(add_completion=False, invoke_without_command=True)

Url = Annotated[str, typer.Option(help="Base URL (http://host:8000), or the full path of one of the APIs.")]
Api = Annotated[str | None, typer.Option(help="chat, completions or anthropic; read off the URL's path if not given.")]
Model = Annotated[str, typer.Option(help="Model to ask for; the first one listed by /v1/models if not given.")]
Extra = Annotated[str, typer.Option(help="JSON object merged into every body; null removes a field.")]
Seed = Annotated[int | None, typer.Option(help="Of prompts and arrivals; drawn and reported if not given.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Say on stderr what is happening.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
SelfTest = Annotated[bool, typer.Option("--self-test/--no-self-test", help="Test the client before the run.")]
Connect = Annotated[float, typer.Option(help="Seconds to wait for a connection.")]
Stall = Annotated[float, typer.Option(help="Seconds of silence of the whole endpoint after which it hangs.")]
Total = Annotated[float, typer.Option(help="Seconds a request may take.")]


@app.callback()
@options.with_options("workload", Workload, *(name for name in declared(Workload) if name != "seed"))
@options.with_options("load", LoadOptions)
def bench(
    context: typer.Context,
    workload: Workload,
    load: LoadOptions,
    url: Url = "",
    api: Api = None,
    model: Model = "",
    api_key_file: options.ApiKeyFile = None,
    extra: Extra = "",
    seed: Seed = None,
    slo: Annotated[str, typer.Option(help="Targets per request: ttft=1s,tpot=50ms,e2e=20s.")] = "",
    ttft_ms: Annotated[float | None, typer.Option(help="Target, ms; the same as in --slo.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Target, ms; the same as in --slo.")] = None,
    e2e_ms: Annotated[float | None, typer.Option(help="Target, ms; the same as in --slo.")] = None,
    attainment: Annotated[float, typer.Option(help="Share of requests that must meet all targets.")] = 0.9,
    search: Annotated[bool, typer.Option("--search", help="Search the goodput, from --rate on.")] = False,
    resolution: Annotated[float, typer.Option(help="Relative width at which the search stops.")] = 0.1,
    gpus: Annotated[int, typer.Option(help="GPUs behind the endpoint.")] = 1,
    predict: Annotated[bool, typer.Option("--predict", help="Put the step-time model's bound beside it.")] = False,
    shape: Annotated[
        str | None, typer.Option(help="Model behind it: name, folder or .gguf; default: what it lists.")
    ] = None,
    hardware: Annotated[str | None, typer.Option(help="Device: a name, this-machine, or a profile's .json.")] = None,
    precision: Annotated[str | None, typer.Option(help="Of its weights, where not the checkpoint's.")] = None,
    kv_precision: Annotated[str | None, typer.Option(help="Of its KV cache.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Check the endpoint's counts with this: a folder, tokenizer.json or .gguf.")
    ] = None,
    count_chunks: Annotated[bool, typer.Option("--count-chunks", help="Without usage, a chunk is a token.")] = False,
    as_tool: Annotated[
        str | None, typer.Option("--as", help="Also as vllm, sglang, guidellm or aiperf define it.")
    ] = None,
    event_log: Annotated[Path | None, typer.Option(help="The event log of our own server, on this machine.")] = None,
    json_out: Json = False,
    verbose: Verbose = False,
    csv: Annotated[Path | None, typer.Option(help="Write one row per request.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report that opens offline.")] = None,
    records: Annotated[Path | None, typer.Option(help="Write raw records, for `headway bench view`.")] = None,
    self_test: SelfTest = True,
    connect_timeout: Connect = 10.0,
    stall_timeout: Stall = 30.0,
    request_timeout: Total = 120.0,
) -> None:
    """Measure a live endpoint: latency percentiles with intervals, throughput, targets met, and what failed.

    Without --rate, --trace or --concurrency one request is in flight at a time.
    """
    if context.invoked_subcommand is not None:
        if url:
            raise typer.BadParameter("give it after the subcommand", param_hint="--url")
        return
    from dataclasses import replace

    import msgspec

    from headway.bench.document import document
    from headway.bench.live import LiveView
    from headway.bench.measure import measure
    from headway.bench.selftest import run_async
    from headway.bench.server import SERVER_COLUMNS, server_values
    from headway.bench.setup import BenchSetup
    from headway.core.errors import HeadwayError
    from headway.metrics.files import Files, to_json
    from headway.report.document import show

    workload = msgspec.structs.replace(workload, seed=_drawn(seed))
    endpoint = replace(_endpoint(url, api, model, api_key_file, extra), count_chunks=count_chunks)
    targets = _targets(slo, ttft_ms, tpot_ms, e2e_ms, attainment)
    behind = None
    if predict or hardware:
        behind = _behind(shape or _served_shape(url, model, api_key_file), hardware, gpus, precision, kv_precision)
    setup = BenchSetup(
        endpoint, load.load(workload.trace, workload.seed), workload, targets,
        _limits(connect_timeout, stall_timeout, request_timeout), behind,
        _recount(tokenizer, shape), self_test, as_tool, event_log, search, resolution, gpus,
    )  # fmt: skip
    files = Files(csv, html, records)
    files.check()
    with LiveView(verbose, quiet=json_out) as view:
        measured = run_async(measure(setup, view.announce, view))
    files.write(
        lambda: document(measured.summary, measured.run), measured.run, measured.endpoint.api, command_line(context),
        SERVER_COLUMNS, server_values(measured.sides),
    )  # fmt: skip
    if measured.unreachable and not json_out:
        raise HeadwayError(measured.unreachable)
    if json_out:
        typer.echo(to_json(measured.summary))
    else:
        show(document(measured.summary, measured.run))
    if measured.summary.get("goodput", {}).get("interrupted"):
        raise typer.Exit(130)
    if not measured.summary["requests"]["completed"]:
        raise typer.Exit(1)


@app.command()
def lengths(
    url: Url,
    api: Api = None,
    model: Model = "",
    api_key_file: options.ApiKeyFile = None,
    extra: Extra = "",
    sizes: Annotated[str, typer.Option(help="Prompt lengths in tokens.")] = "50,500,5000",
    times: Annotated[int, typer.Option(help="How often each is sent.")] = 5,
    output_tokens: Annotated[int, typer.Option(help="Limit on answers (max_tokens).")] = 64,
    seed: Seed = None,
    json_out: Json = False,
    verbose: Verbose = False,
    plot: Annotated[Path | None, typer.Option(help="Write the plot (.svg or .png).")] = None,
    connect_timeout: Connect = 10.0,
    stall_timeout: Stall = 120.0,
    request_timeout: Total = 300.0,
) -> None:
    """TTFT and TPOT against prompt length; then the longest prompt twice: what the prefix cache saves."""
    from headway.bench import lengths as exercise
    from headway.bench.live import LiveView
    from headway.bench.selftest import run_async
    from headway.metrics.files import to_json
    from headway.report.document import show
    from headway.report.figures import check_plot

    endpoint = _endpoint(url, api, model, api_key_file, extra)
    limits = _limits(connect_timeout, stall_timeout, request_timeout)
    wanted = exercise.parse_sizes(sizes)
    check_plot(plot)
    with LiveView(verbose, quiet=json_out) as view:
        found = run_async(
            exercise.run(endpoint, limits, wanted, times, output_tokens, _drawn(seed), view.announce, view)
        )
    if plot is not None:
        exercise.plot(found, plot)
    if json_out:
        typer.echo(to_json(found))
    else:
        show(exercise.document(found))
    if not any(row["completed"] for row in found["lengths"]):
        raise typer.Exit(1)


@app.command()
def view(
    records: Annotated[Path, typer.Argument(help="File written by --records.")],
    as_tool: Annotated[str, typer.Option("--as", help="vllm, sglang, guidellm or aiperf.")],
) -> None:
    """Print a saved run with another tool's names and definitions, as JSON."""
    from headway.metrics.files import load_records, to_json
    from headway.metrics.views import view as express

    run, api = load_records(records)
    typer.echo(to_json(express(as_tool, run, api)))


def _endpoint(url: str, api: str | None, model: str, key_file: Path | None, extra: str) -> Any:
    from headway.bench.client import Endpoint
    from headway.core.errors import BadInput

    if not url:
        raise BadInput("--url", "is needed, such as http://127.0.0.1:8000")
    return Endpoint.parse(url, api, model, options.api_key(key_file) or "", extra)


def _recount(tokenizer: str | None, shape: str | None) -> Any:
    """What counts tokens again: --tokenizer, or the files of --shape where it names any."""
    from headway.bench.recount import Recount

    if tokenizer is None and shape is not None:
        files = Path(shape).expanduser()
        has_one = files.suffix == ".gguf" or (files / "tokenizer.json").is_file()
        tokenizer = shape if files.exists() and has_one else None
    return None if tokenizer is None else Recount(tokenizer)


def _drawn(seed: int | None) -> int:
    """The seed given, else a new one: equal prompts in a second run would find the first one's in the prefix cache."""
    import secrets

    return secrets.randbelow(1 << 32) if seed is None else seed


def _limits(connect: float, stall: float, total: float) -> Any:
    from headway.bench.client import Timeouts

    return Timeouts(connect, stall, total)


def _targets(slo: str, ttft: float | None, tpot: float | None, e2e: float | None, attainment: float) -> Any:
    from dataclasses import replace

    from headway.metrics.summary import Targets

    targets = Targets.parse(slo, attainment)
    single = {"ttft_ms": ttft, "tpot_ms": tpot, "e2e_ms": e2e}
    targets = replace(targets, **{name: value for name, value in single.items() if value is not None})
    return targets if targets.limits else None


def _served_shape(url: str, model: str, key_file: Path | None) -> Any:
    """The shape of what the endpoint serves: as our own server tells it, else by the name that --model or it gives."""
    from urllib.parse import urlsplit

    import msgspec

    from headway.client.chat import Client, ServerError
    from headway.core.errors import BadInput, HeadwayError
    from headway.engine.references import load_shape
    from headway.shape.model import ModelShape

    needed = "is needed for a prediction: the model behind the endpoint"
    parts = urlsplit(url)
    try:
        client = Client(f"{parts.scheme}://{parts.netloc}", options.api_key(key_file), timeout=10)
        listed = {about["id"]: about.get("shape") for about in client.about_models()}
        name = model or next(iter(listed))
        if listed.get(name):
            return msgspec.convert(listed[name], ModelShape)
    except (ServerError, ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
        raise BadInput("--shape", f"{needed}, and it cannot be asked ({error})") from None
    try:
        return load_shape(name)
    except HeadwayError:
        raise BadInput("--shape", f"{needed}; it calls it {name!r}, which is no known shape") from None


def _behind(shape: Any, hardware: str | None, gpus: int, precision: str | None, kv_precision: str | None) -> Any:
    """What --predict is to assume behind the endpoint."""
    from headway.bench.predict import backing
    from headway.core.errors import BadInput
    from headway.engine.references import load_device, load_shape, profile_of

    if hardware is None:
        raise BadInput("--hardware", "is needed for --predict: a catalogue name, this-machine, or a profile's .json")
    device, profile = load_device(hardware), profile_of(hardware)
    known = load_shape(shape) if isinstance(shape, str) else shape
    return backing(known, device, gpus, precision, kv_precision, profile)
