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
            help='JSON lines, - for stdin: {"prompt": text | ids} or {"messages": [...]}, optional "id" and sampling '
            "fields; or lines of OpenAI's batches."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines, appended as prompts finish, - for stdout; answers it holds are kept, errors retried."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(help="Most tokens to generate; default: 128 after a prompt, a whole turn after messages."),
    ] = None,
    temperature: options.Temperature = None,
    seed: options.Seed = None,
    adapter: options.Adapter = None,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    grammar: options.GrammarFile = None,
    json: Annotated[bool, typer.Option("--json", help="With --prompt: print one JSON object.")] = False,
) -> None:
    """Complete prompts in batches; an interrupted run continues where it stopped."""
    from headway.cli import batch
    from headway.cli.terminal import load_model, note
    from headway.core.errors import BadInput

    if (prompt is None) == (input is None):
        raise BadInput("--prompt", "give either --prompt TEXT or --input FILE with --output FILE")
    if (input is None) != (output is None):
        raise BadInput("--output", "--input and --output go together")
    if prompt == "":
        raise BadInput("--prompt", "is empty; give a text to continue")
    given = options.sampling(
        max_tokens=max_tokens, temperature=temperature, seed=seed, grammar=options.grammar(json_schema, regex, grammar)
    )
    lora = options.adapter(engine, adapter)
    if input is not None and output is not None:
        output = Path("/dev/stdout") if output == batch.STANDARD else output
        work = batch.open_batch(input, output, given)  # bad lines show before the model loads
        if not work.todo:
            note(f"nothing is left to do: {output} holds all {work.total} answers")
            return
        with load_model(engine) as llm:
            failed = batch.run(llm, work, lora)
        if failed:
            note(f"{failed} of {work.total} prompts failed, see their lines; run this again to retry them")
            raise typer.Exit(1)
        return
    assert prompt is not None
    with load_model(engine, quiet=json) as llm:
        params = llm.params(**given)
        if json:
            print(batch.encode(None, llm.generate(prompt, params, adapter=lora, show_progress=False)[0]).decode())
            return
        with llm.stream(prompt, params, adapter=lora) as stream:
            for delta in stream:
                print(delta.text, end="", flush=True)
        print()
