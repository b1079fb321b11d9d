"""`headway serve`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.cli import options
from headway.engine.options import EngineOptions

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@options.with_engine()
def serve(
    engine: EngineOptions,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Other than loopback needs --api-key-file.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 = a free one.")] = 8000,
    api_key_file: Annotated[Path | None, typer.Option(help="Accepted API keys, one a line.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name clients use; default: the model's own.")] = None,
    max_body_mib: Annotated[float, typer.Option(help="Most MiB of one request.")] = 8.0,
    shutdown_timeout: Annotated[float, typer.Option(help="Seconds running requests get after SIGTERM.")] = 30.0,
    stall_timeout: Annotated[float, typer.Option(help="/health fails when a step takes longer, in seconds.")] = 60.0,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin of pages that may read answers, such as https://app.example; * = all."),
    ] = None,
    access_log: Annotated[str, typer.Option(help="A line per request on stderr: off, text, or json.")] = "off",
    log_level: Annotated[str, typer.Option(help="debug, info, warning, or error.")] = "info",
) -> None:
    """Serve a model over HTTP, as OpenAI's API does. Ctrl-C or SIGTERM finishes running requests, then stops."""
    import sys

    import msgspec

    from headway.cli.terminal import fetching
    from headway.core.errors import BadInput
    from headway.model.load import describe
    from headway.model.source import DEFAULT_MODEL
    from headway.serve import logs
    from headway.serve.lifecycle import ServeOptions, run
    from headway.serve.model_text import ModelText

    for flag, value, accepted in (("--access-log", access_log, logs.ACCESS), ("--log-level", log_level, logs.LEVELS)):
        if value not in accepted:
            raise BadInput(flag, f"{value!r} is not one of {', '.join(accepted)}")
    logs.configure(log_level, access_log)
    with fetching() as progress:
        info = describe(engine.model or DEFAULT_MODEL, progress)
    engine = msgspec.structs.replace(engine, model=str(info.path))
    code = run(
        ServeOptions(
            model=served_model_name or info.name,
            host=host,
            port=port,
            api_key_file=api_key_file,
            shutdown_timeout=shutdown_timeout,
            queue=engine.queue,
            max_body_mib=max_body_mib,
            stall_timeout=stall_timeout,
            cors_origins=cors_origin or (),
            engine_options=msgspec.json.encode(engine),
            chats=info.tokenizer.chat_template is not None,
            load_text=lambda: ModelText(info),
            say=lambda line: print(line, flush=True),
            complain=lambda line: print(f"headway serve: {line}", file=sys.stderr, flush=True),
        )
    )
    raise typer.Exit(code)
