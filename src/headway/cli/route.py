"""`headway route`: one address before several servers."""

from __future__ import annotations

from typing import Annotated

import typer

from headway.cli import options
from headway.serve.route.options import RouteOptions

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@options.with_options("router", RouteOptions)
def route(
    router: RouteOptions,
    replica: Annotated[
        list[str] | None,
        typer.Option(help="URL of a server: Headway, vLLM, SGLang; http://HOST:PORT or unix:PATH. Once for each."),
    ] = None,
) -> None:
    """Pass requests on to the replica that answers soonest. Ctrl-C or SIGTERM finishes running requests, then stops."""
    from headway.serve import logs
    from headway.serve.route.life import run

    logs.configure(router.log_level, router.access_log)
    raise typer.Exit(run(router, replica or [], say=lambda line: print(line, flush=True)))
