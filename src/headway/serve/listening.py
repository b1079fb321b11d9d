"""Where a server listens, and what it does all the while: sockets, uvicorn behind the guarded protocol, upkeep. For
what serves models, and for what routes between servers."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from headway.core.errors import BadInput
from headway.serve.auth import is_loopback
from headway.serve.metrics import LoopLag
from headway.serve.protocol import SWEEP_SECONDS, GuardedProtocol

LAG_SECONDS = 0.1  # how often the event loop's lag is sampled
POLL_SECONDS = 0.05
CLOSE_SECONDS = 3  # connections that do not close by themselves


@contextmanager
def listening(host: str, port: int, uds: str | None, guarded: bool) -> Iterator[list[socket.socket]]:
    """Sockets at an address, or at a path instead, which goes with them.

    Args:
        guarded: only those who have a key are answered.

    Raises:
        BadInput: others reach it and nobody needs a key, or it cannot be listened at.
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not bare:
        raise BadInput("--host", "it is empty; 0.0.0.0 and :: are all addresses")
    if not guarded and not is_loopback(bare):
        raise BadInput("--host", f"{bare} can be reached by others; also give --api-key-file, or use 127.0.0.1")
    with ExitStack() as closing:
        found = bind(bare, port) if uds is None else [bind_path(Path(uds))]
        socks = [closing.enter_context(sock) for sock in found]
        if uds is not None:
            closing.callback(Path(uds).unlink, missing_ok=True)
        yield socks


def bind(host: str, port: int) -> list[socket.socket]:
    """One socket per address of `host` that this machine has: "localhost" may be one of each family.

    Raises:
        BadInput: there is none, or the port is taken.
    """
    socks: list[socket.socket] = []
    failure: OSError | None = None
    try:
        names = ("127.0.0.1", "::1") if host.lower() == "localhost" else (host,)  # whatever /etc/hosts says
        infos = [info for name in names for info in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        raise BadInput("--host", f"{host!r} is not an address of this machine: {error}") from None
    found = {info[4]: info[:3] for info in infos}
    for address, kind in found.items():
        if socks and not port:  # 0: all on the one the first got
            address = (address[0], socks[0].getsockname()[1], *address[2:])
        try:
            sock = socket.socket(*kind)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if len(found) > 1 and kind[0] == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            socks.append(sock)
        except OSError as error:
            failure = error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                break
    if not socks or (failure is not None and failure.errno == errno.EADDRINUSE):
        problem = failure.strerror if failure is not None else "no address"
        raise BadInput("--port", f"cannot listen on {host}:{port}: {problem}")
    return socks


def bind_path(path: Path) -> socket.socket:
    """A socket in the file system, for this user only; one that a server left behind is replaced.

    Raises:
        BadInput: there is another file, a server listens already, or there can be none.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX) as other, suppress(ConnectionRefusedError):
                other.connect(str(path))
                raise BadInput("--uds", f"a server listens on {str(path)!r} already")
            path.unlink()
        mask = os.umask(0o177)
        try:
            sock.bind(str(path))
        finally:
            os.umask(mask)
    except OSError as error:
        sock.close()
        raise BadInput("--uds", f"cannot listen on {str(path)[:120]!r}: {error.strerror or error}") from None
    except BadInput:
        sock.close()
        raise
    return sock


class QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers: the first signal here means drain."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def server_of(app: ASGIApp) -> QuietServer:
    """An app behind the guarded protocol; `serve` runs it."""
    return QuietServer(
        uvicorn.Config(
            app,
            http=GuardedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=CLOSE_SECONDS,
            backlog=2048,
        )
    )


def url_of(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def sample_lag(fold: Callable[[LoopLag], None]) -> None:
    """Say for ever how late the event loop is."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + LAG_SECONDS
        await asyncio.sleep(LAG_SECONDS)
        fold(LoopLag(max(0.0, loop.time() - due)))


async def sweep(server: uvicorn.Server) -> None:
    """End for ever what its clients neither send nor read."""
    while True:
        await asyncio.sleep(SWEEP_SECONDS)
        for connection in list(server.server_state.connections):
            connection.sweep(time.monotonic())  # type: ignore[union-attr]


async def until_idle(busy: Callable[[], object], seconds: float) -> None:
    """Wait until nothing is busy, for so many seconds at most."""
    end = time.monotonic() + seconds
    while busy() and time.monotonic() < end:
        await asyncio.sleep(POLL_SECONDS)
