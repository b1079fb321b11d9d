"""`headway serve`: an HTTP server with OpenAI's API, and Ollama's."""

from __future__ import annotations

import typer

from headway.cli import options
from headway.engine.options import EngineOptions
from headway.serve.options import ServeOptions

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@options.with_options("server", ServeOptions)
@options.with_engine()
def serve(engine: EngineOptions, server: ServeOptions) -> None:
    """Serve a model over HTTP, as OpenAI's API does. Ctrl-C or SIGTERM finishes running requests, then stops."""
    import sys

    import msgspec

    from headway.cli.terminal import fetching
    from headway.core.errors import BadInput
    from headway.model.load import describe
    from headway.model.source import DEFAULT_MODEL
    from headway.serve import logs
    from headway.serve.lifecycle import Served, run
    from headway.serve.model_text import ModelText

    logs.configure(server.log_level, server.access_log)
    with fetching() as progress:
        info = describe(engine.model or DEFAULT_MODEL, progress, engine.chat_template)
    engine, name = msgspec.structs.replace(engine, model=str(info.path)), server.served_model_name or info.name
    if name in engine.loras:
        raise BadInput("--lora", f"{name!r} is the model itself; give the adapter another name")
    if server.allow_lora_loading is not None and not engine.lora_room:
        raise BadInput("--allow-lora-loading", "there is no room for adapters; --max-loras makes some")
    served = Served(
        model=name,
        engine_options=msgspec.json.encode(engine),
        queue=engine.queue,
        load_text=lambda: ModelText(info),
        chats=info.tokenizer.chat_template is not None,
        say=lambda line: print(line, flush=True),
        complain=lambda line: print(f"headway serve: {line}", file=sys.stderr, flush=True),
    )
    raise typer.Exit(run(server, served))
