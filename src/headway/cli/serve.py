"""`headway serve`: an HTTP server with OpenAI's API, and Ollama's."""

from __future__ import annotations

from typing import Annotated

import typer

from headway.cli import options
from headway.core.options import declared
from headway.engine.options import EngineOptions
from headway.serve.options import ServeOptions

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
MODEL = declared(EngineOptions)["model"]


@app.command()
@options.with_options("server", ServeOptions)
@options.with_engine(*(name for name in declared(EngineOptions) if name != MODEL.name))
def serve(
    engine: EngineOptions,
    server: ServeOptions,
    model: Annotated[
        list[str] | None, typer.Argument(help=f"{MODEL.help} Several are served by an engine each.")
    ] = None,
    replicas: Annotated[
        int, typer.Option(help="Servers of these models, each with its share of cores and memory, behind one router.")
    ] = 1,
    prefill: Annotated[
        int, typer.Option(help="Servers that compute long prompts for those of --decode, behind one router.")
    ] = 0,
    decode: Annotated[int, typer.Option(help="Servers that answer; for --prefill.")] = 0,
) -> None:
    """Serve models over HTTP, as OpenAI's API does. Ctrl-C or SIGTERM finishes running requests, then stops."""
    import sys
    from functools import partial

    import msgspec

    from headway.cli.terminal import fetching
    from headway.core.errors import BadInput
    from headway.engine.draft_model import describe_draft
    from headway.engine.several import divided
    from headway.model.load import describe
    from headway.model.source import DEFAULT_MODEL, asked_as
    from headway.serve import logs
    from headway.serve.hosted import Served
    from headway.serve.lifecycle import run
    from headway.serve.model_text import ModelText
    from headway.serve.route.children import end_with_parent

    end_with_parent()
    logs.configure(server.log_level, server.access_log)
    if (prefill, decode) != (0, 0):
        if replicas != 1 or prefill < 1 or decode < 1:
            raise BadInput("--prefill", "give a number from 1 to --prefill and to --decode, and no --replicas")
        replicas = prefill + decode
    if replicas != 1:
        from headway.serve.route.own import serve_replicas

        raise typer.Exit(
            serve_replicas(engine, server, model or [], replicas, lambda line: print(line, flush=True), prefill)
        )
    with fetching() as progress:
        sources = model or [DEFAULT_MODEL]
        infos = [describe(source, progress, engine.chat_template) for source in sources]
        draft = describe_draft(engine.draft, progress)
    names = server.served_model_name or [info.name for info in infos]
    if len(names) != len(infos):
        raise BadInput("--served-model-name", f"{len(names)} names for {len(infos)} models; give each model one")
    known = dict(zip(names, infos, strict=True))
    if len(known) < len(infos):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise BadInput("model", f"two are called {twice!r}; --served-model-name, once for each, tells them apart")
    engines = divided(engine, known, draft)
    for name in known:
        if name in engines[name].loras:
            raise BadInput("--lora", f"{name!r} is the model itself; give the adapter another name")
    if server.allow_lora_loading is not None and not engine.lora_room:
        raise BadInput("--allow-lora-loading", "there is no room for adapters; --max-loras makes some")
    served = [
        Served(
            model=name,
            also=() if server.served_model_name else asked_as(source),
            engine_options=msgspec.json.encode(engines[name]),
            queue=engine.queue,
            load_text=partial(ModelText, info, server.tool_parser),
            chats=info.tokenizer.chat_template is not None,
        )
        for source, (name, info) in zip(sources, known.items(), strict=True)
    ]
    raise typer.Exit(
        run(
            server,
            served,
            say=lambda line: print(line, flush=True),
            complain=lambda line: print(f"headway serve: {line}", file=sys.stderr, flush=True),
        )
    )
