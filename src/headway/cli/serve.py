"""`headway serve`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headway.cli import options

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def serve(
    model: options.Model = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Other than loopback needs --api-key-file.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 = a free one.")] = 8000,
    api_key_file: Annotated[Path | None, typer.Option(help="Accepted API keys, one a line.")] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name clients use; default: the model's own.")] = None,
    max_model_len: options.MaxModelLen = None,
    kv_cache_gib: options.KVCacheGiB = None,
    threads: options.Threads = None,
    backend: options.Backend = "auto",
    weights: options.Weights = "stored",
    group: options.Group = None,
    pack_cache: options.PackCache = True,
    max_rows: Annotated[int, typer.Option(help="Most requests that run at once.")] = 32,
    max_step_tokens: Annotated[int, typer.Option(help="Most new tokens in one step: the chunk budget.")] = 512,
    step_ms: Annotated[
        float | None, typer.Option(help="Longest step a prompt chunk may cause beside decodes; needs `headway probe`.")
    ] = None,
    policy: Annotated[str, typer.Option(help="chunked, prefill-first, or static.")] = "chunked",
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Refuse a backend whose answers depend on the batch.")
    ] = False,
    max_queued: Annotated[int, typer.Option(help="Most requests that wait; more are answered 503.")] = 1024,
    max_queued_tokens: Annotated[int, typer.Option(help="Most prompt tokens that wait.")] = 4_000_000,
    max_body_mib: Annotated[float, typer.Option(help="Most MiB of one request.")] = 8.0,
    shutdown_timeout: Annotated[float, typer.Option(help="Seconds running requests get after SIGTERM.")] = 30.0,
    stall_timeout: Annotated[float, typer.Option(help="/health fails when a step takes longer, in seconds.")] = 60.0,
    event_log: Annotated[Path | None, typer.Option(help="File for the event log.")] = None,
) -> None:
    """Serve a model over HTTP, as OpenAI's API does. Ctrl-C or SIGTERM finishes running requests, then stops."""
    import logging
    import sys

    import msgspec

    from headway.cli.terminal import fetching
    from headway.core.errors import BadInput
    from headway.engine.options import EngineOptions
    from headway.model.load import describe
    from headway.model.source import DEFAULT_MODEL
    from headway.serve.lifecycle import ServeOptions, run
    from headway.serve.model_text import ModelText

    if event_log is not None and not event_log.absolute().parent.is_dir():
        raise BadInput("--event-log", f"{str(event_log)!r} is in no folder that exists")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    with fetching() as progress:
        info = describe(model or DEFAULT_MODEL, progress)
    engine = EngineOptions(
        model=str(info.path),
        backend=backend,
        threads=threads,
        kv_cache_gib=kv_cache_gib,
        max_model_len=max_model_len,
        weights=weights,
        group=group,
        pack_cache=pack_cache,
        max_rows=max_rows,
        max_step_tokens=max_step_tokens,
        step_ms=step_ms,
        policy=policy,
        deterministic=deterministic,
        max_queued=max_queued,
        max_queued_tokens=max_queued_tokens,
        event_log=None if event_log is None else str(event_log),
    )
    code = run(
        ServeOptions(
            model=served_model_name or info.name,
            host=host,
            port=port,
            api_key_file=api_key_file,
            shutdown_timeout=shutdown_timeout,
            max_queued=max_queued,
            max_queued_tokens=max_queued_tokens,
            max_body_mib=max_body_mib,
            stall_timeout=stall_timeout,
            engine_options=msgspec.json.encode(engine),
            load_text=lambda: ModelText(info),
            say=lambda line: print(line, flush=True),
            complain=lambda line: print(f"headway serve: {line}", file=sys.stderr, flush=True),
        )
    )
    raise typer.Exit(code)
