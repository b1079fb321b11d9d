"""`headway plan`: size, price and explain a deployment from a model's shape and a device's figures.

A verb is a function of headway.plan: its parameters are the options, with the types and defaults it declares itself;
`OPTIONS` gives them flags and help. What it answers is shown, and written as asked.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import typer

from headway import cli
from headway.cli.command import command_line, command_of
from headway.cli.options import numbers


class Verb(NamedTuple):
    """A verb's function in headway.plan, its line of help, the field of the answer whose rows `--csv` writes, and
    whether it has a plot."""

    function: str
    help: str
    rows: str = ""
    plot: bool = False


VERBS = {
    "models": Verb("catalogue.models", "List the models known by name.", "models"),
    "hardware": Verb("catalogue.hardware", "List the devices known by name, with dated prices.", "devices"),
    "step": Verb("steps.step", "One decode step: its seconds, what binds it, and its terms.", plot=True),
    "prefill": Verb("steps.prefill", "Prefill of one prompt: the part of TTFT that is not queueing."),
    "frontier": Verb("steps.frontier", "Interactivity against throughput as the batch grows.", "points", plot=True),
    "capacity": Verb("steps.capacity", "How many sequences fit and meet the speed promised, and what limits them."),
    "tp": Verb("steps.tensor_parallel", "The decode step by number of GPUs, with its all-reduces.", plot=True),
    "cost": Verb("prices.cost", "Dollars per million input and output tokens.", "rows"),
    "invoice": Verb("invoice.invoice", "What a provider's three prices imply here, or which prices leave a margin.",
                    "rows"),
    "ratio": Verb("prices.ratio", "How many times an input token's cost an output token's is, and why."),
    "levers": Verb("prices.levers", "Every lever on the price of a token, and what it is worth here.", "levers"),
    "explain": Verb("explain.explain", "Where a step's time goes, what binds it, and what would help.", plot=True),
    "estimate": Verb("estimates.estimate", "TTFT and TPOT of served requests with their range."),
    "search": Verb("options.find", "Rank deployments that carry this traffic within these targets, cheapest first.",
                   "deployments", plot=True),
    "audit": Verb("audit.audit", "Flag speed claims that break physics.", "claims", plot=True),
    "score": Verb("score.score", "Hold estimates against measured runs: error, bias, coverage of the range."),
}  # fmt: skip

OPTIONS = {  # parameter, of one verb alone as "verb parameter" -> (flags, help); without flags: an argument
    "word": ((), "Only names with this in them."),
    "hardware word": ((), "Only names with this in them; or a FILE.toml with your own."),
    "audit file": ((), "A CSV of published or submitted speeds."),
    "score file": ((), "A CSV of measured runs, with the columns of silicon_runs.csv."),
    "score model": (("--model",), "Whose predictions: estimate, or search."),
    "model": (("--model", "-m"), "A name of `plan models`, a hub id, a folder or config.json, or a .gguf file."),
    "hardware": (("--hardware", "--device"), "A name of `plan hardware`, this-machine, or your own FILE.toml."),
    "search hardware": (("--hardware",), "Devices or FILE.toml with commas; `all` = every GPU with a price."),
    "gpus": (("--gpus", "--n-gpu", "--tp"), "Devices of one replica."),
    "attention_dp": (("--attention-dp", "--dp"), "Groups of the GPUs with sequences of their own."),
    "expert_parallel": (("--expert-parallel", "--ep"), "Groups of the GPUs with experts of their own."),
    "pipeline": (("--pipeline", "--pp"), "Stages of the GPUs, each with a part of the layers."),
    "precision": (("--precision", "--weights"), "Weights: bf16, fp8, int8, int4, fp4; default: as stored."),
    "search precision": (("--precision",), "Weights: stored, bf16, fp8, int4... with commas."),
    "kv": (("--kv", "--kv-precision"), "Cache: bf16, fp8, int8; default: the checkpoint's, else 16 bits."),
    "math": (("--math",), "Format of the arithmetic; default: what the device multiplies such weights in."),
    "peak_tflops": (("--peak-tflops",), "Peak TFLOP/s of one device, in place of the catalogue's."),
    "mode": (("--mode",), "textbook (full N, no overhead), exact (the scheduler's), or calibrated."),
    "engine": (("--engine",), "Whose fitted constants: vllm, sglang, trtllm."),
    "all_reduce": (("--all-reduce",), "Count communication: ring, one-shot, or served (as engines run it)."),
    "link_latency_us": (("--link-latency-us",), "Microseconds per hop of an all-reduce; default: 2."),
    "link_gbs": (("--link-gbs",), "GB/s per direction of a link, in place of the catalogue's."),
    "overhead_us": (("--overhead-us",), "Microseconds added to every step."),
    "skew": (("--skew",), "Unevenness of expert routing (Zipf exponent)."),
    "batch": (("--batch", "-b"), "Sequences in one decode step; where there is no default: the most that fit."),
    "context": (("--context", "-c"), "Mean tokens cached per sequence."),
    "mbu": (("--mbu",), "Divide the bound by this share: an estimate."),
    "chunk": (("--chunk",), "Prompt tokens in the same step; not in textbook mode."),
    "chunk_start": (("--chunk-start",), "Tokens of that prompt computed before."),
    "input_tokens": (("--input-tokens",), "Length of a prompt, in the mean."),
    "output_tokens": (("--output-tokens",), "Length of an answer, in the mean."),
    "cached_tokens": (("--cached-tokens",), "Leading tokens found in the prefix cache."),
    "mfu": (("--mfu",), "Share of peak arithmetic that prefill reaches."),
    "batches": (("--batches",), "Batch sizes, like 1,8,64."),
    "reserve_gb": (("--reserve-gb",), "Memory kept for activations."),
    "tpot_ms": (("--tpot-ms",), "Promised milliseconds per output token."),
    "ttft_ms": (("--ttft-ms",), "Promised milliseconds to the first token."),
    "slo": (("--slo",), "Both at once, like ttft=1s,tpot=50ms."),
    "percentile": (("--percentile",), "Of requests that must meet them."),
    "degrees": (("--degrees",), "Numbers of GPUs of one replica."),
    "table": (("--table",), "By batch, weights only; alone: a 405B model in fp8 on 8 H100."),
    "price": (("--price", "--price-per-gpu-hour"), "Dollars per GPU-hour; default: catalogued."),
    "prices": (("--prices",), "Dollars per GPU-hour, like h100-sxm=2,b200=4, or a FILE.toml; default: catalogued."),
    "price_basis": (("--price-basis",), "Which prices: on-demand, 1-year, 3-year, owned or spot; never mixed."),
    "input_price": (("--input-price",), "Dollars per million input tokens, as sold."),
    "cached_price": (("--cached-price",), "The same of input found in the cache; default: a tenth."),
    "output_price": (("--output-price",), "Dollars per million output tokens, as sold."),
    "margin": (("--margin",), "Share of the price to be left, where no prices are given."),
    "cache_hit": (("--cache-hit",), "Share of input found in the prefix cache."),
    "hit_cost": (("--hit-cost",), "Cost of a hit over that of a computed token."),
    "utilisation": (("--utilisation", "--utilization"), "Share of the time the replica is busy."),
    "acceptance": (("--acceptance",), "Share of drafted tokens accepted."),
    "draft_cost": (("--draft-cost",), "A draft step over a target step."),
    "acceptance_curve": (("--acceptance-curve",), "Measured tokens per step for 1,2,3... drafts, like 1.8,2.5."),
    "concurrency": (("--concurrency",), "Requests in flight."),
    "rate": (("--rate",), "Requests per second; default: the trace's."),
    "trace": (("--trace",), "Azure .csv or Mooncake .jsonl, for rate, lengths and hits."),
    "prefill_hardware": (("--prefill-hardware",), "Devices of prefill pools; default: the same."),
    "write": (("--write",), "Also write scripts and compose files that start the first to this folder."),
    "users": (("--users",), "People who ask, read and think, in place of a rate."),
    "think_time": (("--think-time",), "Seconds between an answer's end and a user's next request."),
    "turns": (("--turns",), "Turns of a user's session, each after all that was said before."),
    "split": (("--split/--no-split",), "Also try separate prefill and decode pools."),
    "budget": (("--budget",), "Most dollars per hour."),
    "most": (("--most",), "Deployments to list."),
    "finalists": (("--finalists",), "Of the cheapest, to be played by the simulator; 0 = none."),
    "html": (("--html",), "Also write a page that opens offline."),
    "csv": (("--csv",), "Also write the rows to this file."),
    "plot": (("--plot",), "Also draw to this .png or .svg file."),
    "json": (("--json",), "Print JSON."),
}  # fmt: skip


def app(args: Sequence[str], prog_name: str, **settings: Any) -> Any:
    """Run one verb of `args`, as typer's apps are run."""
    if not args or args[0] in ("-h", "--help"):
        width = max(map(len, VERBS))
        verbs = "\n".join(f"  {name:<{width}}  {verb.help}" for name, verb in VERBS.items())
        print(f"Usage: {prog_name} VERB [options]      ({prog_name} VERB --help for its options)\n\n{verbs}")
        return 0 if args else 2
    if args[0] not in VERBS:
        near = difflib.get_close_matches(args[0], VERBS, 1)
        wanted = f"did you mean {near[0]}?" if near else f"choose from {', '.join(VERBS)}"
        print(f"{prog_name}: {args[0]!r} is not a verb; {wanted}", file=sys.stderr)
        return 2
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(help=VERBS[args[0]].help)(command(args[0], VERBS[args[0]]))
    run = command_of(single, ("plan", cli.VERBS), (args[0], VERBS))
    return run(args=args[1:], prog_name=f"{prog_name} {args[0]}", **settings)


def command(name: str, verb: Verb) -> Callable[..., None]:
    """The verb as typer wants it: a function whose signature is its options."""
    from headway.plan.setup import Setup

    module, _, called = verb.function.partition(".")
    function = getattr(importlib.import_module(f"headway.plan.{module}"), called)
    own = dict(inspect.signature(function, eval_str=True).parameters)
    shared = dict(inspect.signature(Setup).parameters) if own.pop("setup", None) else {}
    types = get_type_hints(Setup)
    shared = {key: value.replace(annotation=types[key]) for key, value in shared.items()}
    files = ["html", *(["csv"] if verb.rows else []), *(["plot"] if verb.plot else [])]
    lists = {key: kind for key, value in own.items() if (kind := number_of(value.annotation))}

    def run(typed: typer.Context, json: bool, **given: Any) -> None:
        paths = {key: given.pop(key) for key in files}
        check_files(paths)
        for key, kind in lists.items():
            given[key] = numbers(given[key], OPTIONS[key][0][0], kind)
        if shared:
            given["setup"] = Setup(**{key: given.pop(key) for key in shared})
        with ExitStack() as stack:
            more = stack.enter_context(playing()) if "play" in own else {}
            answer = function(**given, **more)
        show(answer, json, verb.rows, paths, typed)
        if answer.failed:
            raise typer.Exit(1)

    parameters = [inspect.Parameter("typed", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for key, parameter in (shared | own).items():
        if f"{name} {key}" in OPTIONS or key in OPTIONS:
            parameters.append(option(name, key, parameter.annotation, parameter.default))
    parameters += [option(name, key, Path | None, None) for key in files]
    parameters.append(option(name, "json", bool, False))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


@contextmanager
def playing() -> Iterator[dict[str, Any]]:
    """`play`, by which the planner, that knows no simulator, has deployments played."""
    from headway.cli.terminal import progress
    from headway.plan.candidates import Candidate
    from headway.plan.finalists import Request, Staged
    from headway.simulate.staged import play_replica

    with progress() as report:

        def play(candidate: Candidate, staged: Staged) -> Sequence[Request]:
            name, asked = f"simulating {candidate.name}", staged._asdict()
            return play_replica(
                candidate.deployment,
                candidate.profile,
                progress=lambda done: report(name, done, staged.requests),
                **asked,
            )

        yield {"play": play}


def option(verb: str, key: str, kind: Any, default: Any) -> inspect.Parameter:
    """A typer option, or argument where `OPTIONS` gives no flags; lists are typed with commas."""
    flags, text = OPTIONS.get(f"{verb} {key}") or OPTIONS[key]
    if number_of(kind):
        kind, default = str, ",".join(map(str, default))
    info = typer.Option(*flags, help=text) if flags else typer.Argument(help=text)
    annotation: Any = Annotated[kind, info]
    return inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def number_of(kind: Any) -> type | None:
    """int of Sequence[int], float of Sequence[float], None of anything else."""
    return get_args(kind)[0] if kind in (Sequence[int], Sequence[float]) else None


def check_files(paths: dict[str, Path | None]) -> None:
    """Refuse what cannot be written before the work."""
    from headway.report.figures import check_plot
    from headway.report.files import check_writable

    check_plot(paths.get("plot"))
    for key in ("html", "csv"):
        check_writable(paths.get(key), f"--{key}")


def show(answer: Any, as_json: bool, rows: str, paths: dict[str, Path | None], typed: typer.Context) -> None:
    """Print an answer, as JSON or for people, and write the files asked for."""
    import msgspec

    from headway.plan.render import document
    from headway.report import document as report
    from headway.report.files import write_csv

    if path := paths.get("csv"):
        write_csv(msgspec.to_builtins(getattr(answer, rows, [])), path)
    if path := paths.get("plot"):
        report.write_plot(document(answer), path)
    if path := paths["html"]:
        report.write_page(document(answer), path, command_line(typed))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(answer)).decode())
    else:
        report.show(document(answer))
