"""`headway generate`: complete prompts, one from the command line or many from a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.cli import options
from headway.engine.options import EngineOptions

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@options.with_engine()
def generate(
    engine: EngineOptions,
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
    with load_model(engine, quiet=json) as llm:
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
