"""`headway plan`: size, price and explain a deployment from a model's shape and a device's figures."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli.command import command_line

if TYPE_CHECKING:
    from headway.plan.setup import Setup
else:
    Setup = Any  # typer never sees it: `verb` fills it in

app = typer.Typer(
    help="Size and price a deployment from first principles: bounds are called bounds, estimates estimates.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
)  # fmt: skip

SETUP = {  # options every verb about one deployment has: name -> (type, flags, default, help)
    "model": (str, ("--model", "-m"), None, "A catalogued name, a hub id, a folder or config.json, or a .gguf file."),
    "hardware": (str, ("--hardware", "--device"), None, "A catalogued device, such as h100-sxm."),
    "gpus": (int, ("--gpus", "--n-gpu", "--tp"), 1, "Devices of one replica."),
    "precision": (str, ("--precision", "--weights"), None, "Weights: bf16, fp8, int8, int4, fp4; default: as stored."),
    "kv": (str, ("--kv", "--kv-precision"), None, "Cache: bf16, fp8, int8; default: the checkpoint's, else 16 bits."),
    "math": (str, ("--math",), None, "Format of the arithmetic; default: what the device multiplies such weights in."),
    "peak_tflops": (float, ("--peak-tflops",), None, "Peak TFLOP/s of one device, in place of the catalogue's."),
    "mode": (str, ("--mode",), "textbook", "textbook (full N, no overhead), exact (the scheduler's), or calibrated."),
    "engine": (str, ("--engine",), "vllm", "Whose measured constants calibrated mode takes: vllm, sglang, trtllm."),
    "all_reduce": (str, ("--all-reduce",), None, "Count communication: ring or one-shot."),
    "link_latency_us": (float, ("--link-latency-us",), None, "Microseconds per hop of an all-reduce; default: 2."),
    "link_gbs": (float, ("--link-gbs",), None, "GB/s per direction of a link, in place of the catalogue's."),
    "overhead_us": (float, ("--overhead-us",), 0.0, "Microseconds added to every step."),
    "skew": (float, ("--skew",), 0.0, "Unevenness of expert routing (Zipf exponent)."),
}  # fmt: skip

Batch = Annotated[int, typer.Option("--batch", "-b", help="Sequences in one decode step.")]
Context = Annotated[int, typer.Option("--context", "-c", help="Mean tokens cached per sequence.")]
Reserve = Annotated[float, typer.Option("--reserve-gb", help="Memory kept for activations.")]
MeanInput = Annotated[int, typer.Option("--input-tokens", help="Mean length of a prompt.")]
MeanOutput = Annotated[int, typer.Option("--output-tokens", help="Mean length of an answer.")]
Word = Annotated[str, typer.Argument(help="Only names with this in them.")]
Tpot = Annotated[float | None, typer.Option("--tpot-ms", help="Promised milliseconds per output token.")]
Mfu = Annotated[float, typer.Option("--mfu", help="Share of peak arithmetic that prefill reaches.")]


def verb(
    name: str, csv: str = "", plot: bool = False, must_find: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Register a command: a function from options to an answer, which is shown and written as asked.

    Args:
        csv: field of the answer whose rows `--csv` writes. plot: whether the answer has a plot for `--plot`.
        must_find: whether an answer without such rows is a failure, exit code 1.
    A first parameter `setup` is filled from the options in `SETUP`.
    """

    def register(function: Callable[..., Any]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters
        files = {"html": "Also write a page that opens offline."}
        files |= {"csv": "Also write the rows to this file."} if csv else {}
        files |= {"plot": "Also draw to this .png or .svg file."} if plot else {}

        @functools.wraps(function)
        def command(typed: typer.Context, json: bool, **given: Any) -> None:
            from headway.plan.setup import Setup

            paths = {key: given.pop(key) for key in files}
            check_files(paths)
            if "setup" in own:
                given["setup"] = Setup(**{key: given.pop(key) for key in SETUP})
            answer = function(**given)
            show(answer, json, csv, paths, typed)
            if must_find and not getattr(answer, csv):
                raise typer.Exit(1)

        options = [_option(key, *described) for key, described in SETUP.items() if "setup" in own]
        output = [_option(key, Path, (f"--{key}",), None, text) for key, text in files.items()]
        parameters = [
            inspect.Parameter("typed", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context), *options,
            *(p.replace(kind=p.KEYWORD_ONLY) for p in own.values() if p.name != "setup"), *output,
            _option("json", bool, ("--json",), False, "Print JSON."),
        ]  # fmt: skip
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return app.command(name)(command)

    return register


def _option(key: str, kind: Any, flags: tuple[str, ...], default: Any, text: str) -> inspect.Parameter:
    kind = kind | None if default is None else kind
    annotation: Any = Annotated[kind, typer.Option(*flags, help=text)]
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def check_files(paths: dict[str, Path | None]) -> None:
    """Refuse what cannot be written before the work."""
    from headway.report.figures import check_plot
    from headway.report.files import check_writable

    check_plot(paths.get("plot"))
    for key in ("html", "csv"):
        check_writable(paths.get(key), f"--{key}")


def show(answer: Any, as_json: bool, csv: str, paths: dict[str, Path | None], typed: typer.Context) -> None:
    """Print an answer, as JSON or for people, and write the files asked for."""
    import msgspec

    from headway.plan.render import document
    from headway.report import document as report
    from headway.report.files import write_csv

    if path := paths.get("csv"):
        write_csv(msgspec.to_builtins(getattr(answer, csv, [])), path)
    if path := paths.get("plot"):
        report.write_plot(document(answer), path)
    if path := paths["html"]:
        report.write_page(document(answer), path, command_line(typed))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(answer)).decode())
    else:
        report.show(document(answer))


def numbers(text: str, field: str) -> list[int]:
    """Whole numbers from "1,2,4"."""
    from headway.core.errors import BadInput

    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise BadInput(field, f"{text!r}; accepted: whole numbers with commas, like 1,2,4,8") from None


@verb("step", plot=True)
def step(
    setup: Setup,
    batch: Batch = 1,
    context: Context = 4096,
    mbu: Annotated[float | None, typer.Option("--mbu", help="Divide the bound by this share: an estimate.")] = None,
    chunk: Annotated[int, typer.Option("--chunk", help="Prompt tokens in the same step; not in textbook mode.")] = 0,
    chunk_start: Annotated[int, typer.Option("--chunk-start", help="Tokens of that prompt computed before.")] = 0,
) -> Any:
    """One decode step: its seconds, what binds it, and a waterfall of its terms."""
    from headway.plan import steps

    return steps.step(setup, batch, context, mbu, chunk, chunk_start)


@verb("prefill")
def prefill(
    setup: Setup,
    input_tokens: Annotated[int, typer.Option("--input-tokens", help="Length of the prompt.")] = 2000,
    cached: Annotated[int, typer.Option("--cached-tokens", help="Leading tokens found in the prefix cache.")] = 0,
    mfu: Mfu = 0.5,
) -> Any:
    """Prefill of one prompt: the part of the time to first token that is not queueing."""
    from headway.plan import steps

    return steps.prefill(setup, input_tokens, mfu, cached)


@verb("frontier", csv="points", plot=True)
def frontier(
    setup: Setup,
    context: Context = 4096,
    batches: Annotated[
        str | None, typer.Option("--batches", help="Batch sizes, like 1,8,64; default: a ladder.")
    ] = None,
    reserve_gb: Reserve = 0.0,
) -> Any:
    """Interactivity against throughput as the batch grows: knee, critical context, ceiling."""
    from headway.plan import steps

    return steps.frontier(setup, context, numbers(batches, "--batches") if batches else None, reserve_gb)


@verb("capacity")
def capacity(setup: Setup, context: Context = 4096, tpot_ms: Tpot = None, reserve_gb: Reserve = 0.0) -> Any:
    """How many sequences fit and meet the speed promised, and which limit is the first."""
    from headway.plan import steps

    return steps.capacity(setup, context, tpot_ms, reserve_gb)


@verb("tp", plot=True)
def tp(
    setup: Setup,
    degrees: Annotated[str, typer.Option("--degrees", help="GPU counts to compare.")] = "1,2,4,8",
    batch: Batch = 1,
    context: Context = 0,
) -> Any:
    """The decode step by tensor-parallel degree, with its all-reduces."""
    from headway.plan import steps

    return steps.tensor_parallel(setup, numbers(degrees, "--degrees"), batch, context)


@verb("cost", csv="rows")
def cost(
    setup: Setup,
    table: Annotated[
        bool, typer.Option("--table", help="By batch, weights only; alone: a 405B model in fp8 on 8 H100.")
    ] = False,
    batches: Annotated[str, typer.Option("--batches", help="Batch sizes of the table.")] = "1,8,64,256",
    batch: Annotated[int | None, typer.Option("--batch", "-b", help="Default: the largest that fits.")] = None,
    context: Annotated[int | None, typer.Option("--context", "-c", help="Mean tokens cached per sequence.")] = None,
    input_tokens: Annotated[int, typer.Option("--input-tokens", help="Length of a prompt.")] = 2000,
    price: Annotated[
        float | None, typer.Option("--price", "--price-per-gpu-hour", help="Dollars per GPU-hour; default: catalogued.")
    ] = None,
    mfu: Mfu = 0.5,
    cache_hit: Annotated[float, typer.Option("--cache-hit", help="Share of input found in the prefix cache.")] = 0.0,
    hit_cost: Annotated[float, typer.Option("--hit-cost", help="Cost of a hit over that of a computed token.")] = 0.0,
    utilisation: Annotated[
        float, typer.Option("--utilisation", "--utilization", help="Share of the time the replica is busy.")
    ] = 1.0,
    tpot_ms: Tpot = None,
) -> Any:
    """Dollars per million input and output tokens."""
    import msgspec

    from headway.plan import prices

    if table:
        if setup.model is None and setup.hardware is None:  # the first text's example, its rounded peak included
            setup = msgspec.structs.replace(
                setup, model="llama-3.1-405b", hardware="h100-rounded-1e15", gpus=8, precision="fp8", kv="fp8"
            )
        pricing = prices.Pricing(context=8192 if context is None else context, price=price, mfu=mfu)
        return prices.cost_table(setup, numbers(batches, "--batches"), pricing)
    pricing = prices.Pricing(
        batch, 4096 if context is None else context, input_tokens, price, mfu, cache_hit, hit_cost, utilisation, tpot_ms
    )
    return prices.cost(setup, pricing)


@verb("ratio")
def ratio(
    setup: Setup,
    batch: Batch = 64,
    context: Context = 4096,
    mfu: Mfu = 0.5,
    input_tokens: Annotated[
        int | None, typer.Option("--input-tokens", help="Length of a prompt, in exact mode; default: 2000.")
    ] = None,
) -> Any:
    """How many times an input token's cost an output token's is, and why."""
    from headway.plan import prices

    return prices.ratio(setup, batch, context, mfu, input_tokens)


@verb("levers", csv="levers")
def levers(
    setup: Setup,
    batch: Batch = 64,
    input_tokens: MeanInput = 2000,
    output_tokens: MeanOutput = 500,
    acceptance: Annotated[float, typer.Option("--acceptance", help="Share of drafted tokens accepted.")] = 0.8,
    draft_cost: Annotated[float, typer.Option("--draft-cost", help="A draft step over a target step.")] = 0.05,
    curve: Annotated[
        str | None, typer.Option("--acceptance-curve", help="Measured tokens per step for 1,2,3... drafts.")
    ] = None,
    cache_hit: Annotated[float, typer.Option("--cache-hit", help="Share of input found in the prefix cache.")] = 0.5,
) -> Any:
    """Every lever on the price of a token: which term it changes, and by how much here."""
    from headway.core.errors import BadInput
    from headway.plan import prices
    from headway.roofline.speculation import Draft

    try:
        measured = tuple(float(part) for part in curve.split(",")) if curve else ()
    except ValueError:
        raise BadInput("--acceptance-curve", f"{curve!r}; accepted: numbers with commas, like 1.8,2.5,3.0") from None
    draft = Draft(acceptance, draft_cost, measured)
    return prices.levers(setup, batch, input_tokens, output_tokens, draft, cache_hit)


@verb("explain", plot=True)
def explain(
    setup: Setup,
    batch: Annotated[int | None, typer.Option("--batch", "-b", help="Default: the largest possible.")] = None,
    context: Context = 4096,
    tpot_ms: Tpot = None,
) -> Any:
    """Where a step's time goes, what binds it, what would help, and what would bind then."""
    from headway.plan.explain import explain

    return explain(setup, batch, context, tpot_ms)


@verb("estimate")
def estimate(
    setup: Setup,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Requests in flight.")] = 64,
    input_tokens: MeanInput = 2000,
    output_tokens: MeanOutput = 500,
) -> Any:
    """TTFT and TPOT of served requests, from constants fitted on public runs, with their range."""
    from headway.plan.estimates import estimate

    return estimate(setup, concurrency, input_tokens, output_tokens)


@verb("score")
def score(
    file: Annotated[Path, typer.Argument(help="A CSV of measured runs, with the columns of silicon_runs.csv.")],
) -> Any:
    """Hold calibrated predictions against measured runs: error, bias, coverage of the range, abstentions."""
    from headway.plan.score import score

    return score(file)


@verb("search", csv="deployments", plot=True, must_find=True)
def search(
    model: Annotated[str, typer.Option("--model", "-m", help="A catalogued name, hub id, folder or .gguf file.")],
    hardware: Annotated[str, typer.Option("--hardware", help="Devices with commas; `all` = every GPU with a price.")],
    rate: Annotated[float | None, typer.Option("--rate", help="Requests per second; default: the trace's.")] = None,
    input_tokens: Annotated[float, typer.Option("--input-tokens", help="Mean prompt.")] = 2000,
    output_tokens: Annotated[float, typer.Option("--output-tokens", help="Mean answer.")] = 500,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Azure .csv or Mooncake .jsonl, for all of these.")
    ] = None,
    cache_hit: Annotated[float | None, typer.Option("--cache-hit", help="Share of input in the prefix cache.")] = None,
    ttft_ms: Annotated[float | None, typer.Option("--ttft-ms", help="Promised time to first token.")] = None,
    tpot_ms: Tpot = None,
    slo: Annotated[str | None, typer.Option("--slo", help="Both at once, like ttft=1s,tpot=50ms.")] = None,
    percentile: Annotated[float, typer.Option("--percentile", help="Of requests that must meet them.")] = 99.0,
    precisions: Annotated[str, typer.Option("--precision", help="stored, bf16, fp8, int4... with commas.")] = "stored",
    kv: Annotated[str | None, typer.Option("--kv", help="Cache: bf16 or fp8.")] = None,
    degrees: Annotated[str, typer.Option("--degrees", help="GPUs of one replica.")] = "1,2,4,8",
    split: Annotated[bool, typer.Option(help="Also try separate prefill and decode pools.")] = True,
    budget: Annotated[float | None, typer.Option("--budget", help="Most dollars per hour.")] = None,
    prices: Annotated[
        str | None, typer.Option("--prices", help="Dollars per GPU-hour, like h100-sxm=2,b200=4.")
    ] = None,
    most: Annotated[int, typer.Option("--most", help="Deployments to list.")] = 10,
    engine: Annotated[str, typer.Option("--engine", help="Whose measured constants to take.")] = "vllm",
) -> Any:
    """Rank deployments that carry this traffic within these targets, cheapest first, with the flags to run them.

    Exit code 1: none does.
    """
    from headway.plan import options
    from headway.plan.models import load_shape
    from headway.plan.search import Wanted, search

    traffic = options.traffic(trace, rate, input_tokens, output_tokens, cache_hit)
    target = options.target(ttft_ms, tpot_ms, slo, percentile)
    wanted = Wanted(
        options.devices(hardware), tuple(precisions.split(",")), kv, tuple(numbers(degrees, "--degrees")), split,
        budget, options.prices(prices), most, engine,
    )  # fmt: skip
    return search(model, load_shape(model), traffic, target, wanted)


@verb("audit", csv="claims")
def audit(file: Annotated[Path, typer.Argument(help="A CSV of published or submitted speeds.")]) -> Any:
    """Flag speed claims that break physics: MBU or MFU above 1, sparse peaks, prompts counted as output."""
    from headway.plan.audit import audit

    return audit(file)


@verb("models", csv="models", must_find=True)
def models(word: Word = "") -> Any:
    """List the models known by name."""
    from headway.plan import catalogue

    return catalogue.models(word)


@verb("hardware", csv="devices", must_find=True)
def hardware(word: Word = "") -> Any:
    """List the devices known by name, with their prices and when those were seen."""
    from headway.plan import catalogue

    return catalogue.hardware(word)


if __name__ == "__main__":
    app()
