"""`headway generate`: complete prompts, one from the command line or many from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli import options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def generate(
    model: options.Model = None,
    prompt: Annotated[str | None, typer.Option(help="One prompt; the completion goes to stdout.")] = None,
    input: Annotated[
        Path | None,
        typer.Option(
            help='JSON lines: {"prompt": text | ids} or {"messages": [...]}, optional "id" and sampling fields.'
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="JSON lines, appended as prompts finish; answers it already holds are kept, errors retried."),
    ] = None,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = None,
    json: Annotated[bool, typer.Option("--json", help="With --prompt: print one JSON object.")] = False,
    kv_cache_gib: options.KVCacheGiB = None,
    max_model_len: options.MaxModelLen = None,
    threads: options.Threads = None,
    backend: options.Backend = "auto",
    weights: options.Weights = "stored",
    group: options.Group = None,
    pack_cache: options.PackCache = True,
) -> None:
    """Complete prompts in batches; an interrupted run continues where it stopped."""
    from headway.cli import jobs
    from headway.cli.terminal import load_model, step
    from headway.core.errors import BadInput
    from headway.core.request import SamplingParams

    if (prompt is None) == (input is None):
        raise BadInput("--prompt", "give either --prompt TEXT or --input FILE with --output FILE")
    if (input is None) != (output is None):
        raise BadInput("--output", "--input and --output go together")
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    work = jobs.open_jobs(input, output, params) if input and output else None  # bad lines show before the model loads
    chosen: dict[str, Any] = {
        "kv_cache_gib": kv_cache_gib,
        "max_model_len": max_model_len,
        "threads": threads,
        "backend": backend,
        "weights": weights,
        "group": group,
        "pack_cache": pack_cache,
    }
    with load_model(model, quiet=json, **chosen) as llm:
        if work:
            failed = jobs.run(llm, work)
            if failed:
                step(f"{failed} of {work.total} prompts failed, see their lines; run this again to retry them")
                raise typer.Exit(1)
        elif json:
            assert prompt is not None
            print(jobs.encode(None, llm.generate(prompt, params)[0]).decode())
        else:
            assert prompt is not None
            with llm.stream(prompt, params) as stream:
                for delta in stream:
                    print(delta.text, end="", flush=True)
            print()
