"""`headway lab`: what the planner, the simulator and the sampler compute, moved by hand in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
HOST = "127.0.0.1"


@app.command()
def lab(
    port: Annotated[int, typer.Option(help="Port on this machine; 0 = a free one.", min=0, max=65535)] = 8010,
    runs: Annotated[
        Path | None, typer.Option(help="A CSV of measured runs to lay over the frontier, as `plan score` reads it.")
    ] = None,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Pages about a request, the sampler, the frontier and traffic. Ctrl-C ends it."""
    import asyncio
    import socket
    import webbrowser

    import uvicorn

    from headway.core.errors import BadInput
    from headway.lab.app import lab as pages

    if runs is not None and not runs.is_file():
        raise BadInput("--runs", f"{runs} is not a file")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((HOST, port))
    except OSError as error:
        raise BadInput("--port", f"cannot listen on {HOST}:{port}: {error.strerror}") from None
    url = f"http://{HOST}:{sock.getsockname()[1]}/"
    print(f"the lab is at {url}", flush=True)
    if browser:
        webbrowser.open(url)
    server = uvicorn.Server(uvicorn.Config(pages(runs), log_level="warning", lifespan="off", ws="none"))
    with sock:
        asyncio.run(server.serve(sockets=[sock]))
