"""The life of a server: bind, load, serve, drain, stop; and the exit code that says how it ended.

0  stopped when asked, after draining            2  an option or a model is at fault
1  an engine died (of several: and then a stop)  128 + signal  a second signal: stopped at once
"""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from headway.core.errors import BadInput
from headway.engine.ipc import Failed
from headway.engine.machine import event_loop_factory
from headway.report.prose import folded
from headway.serve.app import Api, Gate
from headway.serve.auth import Keys, is_loopback, read_keys
from headway.serve.cors import Cors
from headway.serve.errors import ApiError
from headway.serve.hosted import HostedModel, Phase, Served
from headway.serve.limits import BodyBudget, raise_file_limit
from headway.serve.metrics import LoopLag, ServerMetrics
from headway.serve.options import ServeOptions
from headway.serve.protocol import SWEEP_SECONDS, GuardedProtocol
from headway.serve.quotas import Quotas
from headway.serve.tracing import Tracer

LAG_SECONDS = 0.1  # how often the event loop's lag is sampled
POLL_SECONDS = 0.05
LINGER_SECONDS = 1.0  # after the engine's death: streams get their error, probes see /health fail
CLOSE_SECONDS = 3  # connections that do not close by themselves

log = logging.getLogger("headway.serve")


def _complain(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(
    options: ServeOptions,
    served: Sequence[Served],
    say: Callable[[str], None] = print,
    complain: Callable[[str], None] = _complain,
) -> int:
    """Serve until a signal or the death of the last engine -> exit code.

    Args:
        served: one or more models, of different names.
        say, complain: print a line for the operator: how things go, and why an engine is gone.

    Raises:
        BadInput: an option is at fault; nothing was started.
    """
    keys = Keys(read_keys(Path(options.api_key_file)), options.share_cache) if options.api_key_file else Keys()
    host = options.host[1:-1] if options.host.startswith("[") and options.host.endswith("]") else options.host
    if not host:
        raise BadInput("--host", "it is empty; 0.0.0.0 and :: are all addresses")
    if not keys and not is_loopback(host):
        raise BadInput("--host", f"{host} can be reached by others; also give --api-key-file, or use 127.0.0.1")
    raise_file_limit()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # texts are encoded in our own threads, beside a busy engine
    with ExitStack() as closing, asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        found = bind(host, options.port) if options.uds is None else [bind_path(Path(options.uds))]
        socks = [closing.enter_context(sock) for sock in found]
        if options.uds is not None:
            closing.callback(Path(options.uds).unlink, missing_ok=True)
        return runner.run(_Life(options, served, keys, socks, say, complain).live())


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


def _lora_folder(options: ServeOptions) -> Path | None:
    """
    Raises:
        BadInput: it is no folder.
    """
    if options.allow_lora_loading is None:
        return None
    folder = Path(options.allow_lora_loading)
    if not folder.is_dir():
        raise BadInput("--allow-lora-loading", f"{options.allow_lora_loading!r} is not a folder")
    return folder.resolve()


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


class _Life:
    def __init__(
        self,
        options: ServeOptions,
        served: Sequence[Served],
        keys: Keys,
        socks: Sequence[socket.socket],
        say: Callable[[str], None],
        complain: Callable[[str], None],
    ) -> None:
        self._options = options
        self._socks = list(socks)
        self._say = say
        self._complain = complain
        self._signals: list[signal.Signals] = []
        self._asked = asyncio.Event()
        self._models = [HostedModel(one) for one in served]
        self._links = [model.link for model in self._models]
        metrics = ServerMetrics(served[0].model if len(served) == 1 else "")
        self._fold = metrics.fold
        budget = BodyBudget(int(options.max_body_mib * 2**20))
        endpoint = options.otlp_traces_endpoint
        tracer = None if endpoint is None else Tracer(endpoint)
        self._api = Api(
            self._models, metrics, budget, int(time.time()), options.stall_timeout, _lora_folder(options),
            options.price, Quotas(options.quota, keys.quotas), options.strict, tracer,
        )  # fmt: skip
        gate = Gate(self._api.routes(), metrics.fold, keys, Cors(options.cors_origin), options.root_path)
        self._server = server_of(gate)

    async def live(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number)
        for link in self._links:
            await link.start()
        serving = asyncio.create_task(self._server.serve(sockets=self._socks))
        watches = [asyncio.create_task(self._sample_lag()), asyncio.create_task(self._sweep())]
        try:
            return await self._serve()
        finally:
            for watch in watches:
                watch.cancel()
            self._server.should_exit = True
            await serving
            await asyncio.gather(*(link.stop() for link in self._links))
            self._api.close()

    def _signalled(self, number: signal.Signals) -> None:
        self._signals.append(number)
        self._asked.set()
        if len(self._signals) > 1:  # now: nothing is waited for, nothing is left behind
            self._say("second signal: stopping at once")
            for link in self._links:
                link.kill()
                link.remove_folder()
            os._exit(128 + number)

    async def _serve(self) -> int:
        asked = asyncio.create_task(self._asked.wait())
        loading = asyncio.create_task(self._load())
        await asyncio.wait((loading, asked), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            await self._drain()
            return 0
        failed = loading.result()
        if failed is not None:
            return failed.exit_code or 1
        for model in self._models:
            model.phase = Phase.READY
        self._announce()
        gc.collect()
        gc.freeze()
        ended = asyncio.gather(*(self._mourn(model) for model in self._models))
        completing = [asyncio.create_task(model.complete()) for model in self._models]
        await asyncio.wait((ended, asked), return_when=asyncio.FIRST_COMPLETED)
        if self._signals:
            await self._drain()
        else:
            await asyncio.sleep(LINGER_SECONDS)
        for task in completing:
            task.cancel()
        ended.cancel()  # what ends from now on was asked to
        with suppress(asyncio.CancelledError):
            await ended
        return 1 if any(link.failed for link in self._links) else 0

    async def _load(self) -> Failed | None:
        """Return when every model is loaded, or why one cannot be."""
        for loaded in asyncio.as_completed([model.load() for model in self._models]):
            await loaded
            for model in self._models:
                if model.link.failed is not None:
                    self._complain(f"{self._whose(model)}{model.link.failed.message}")
                    return model.link.failed
        return None

    def _whose(self, model: HostedModel) -> str:
        """Before a line about one of several models."""
        return f"{model.name}: " if len(self._models) > 1 else ""

    def _announce(self) -> None:
        url = (
            f"unix:{self._options.uds}" if self._options.uds is not None else url_of(*self._socks[0].getsockname()[:2])
        )
        contexts = []
        for model in self._models:
            assert model.ready is not None
            contexts.append(f"{model.ready.max_model_len} tokens")
            for line in model.ready.notes:
                self._say(folded(f"{self._whose(model)}{line}"))
        names = ", ".join(model.name for model in self._models)
        self._say(f"serving {names} at {url}/v1 (context {', '.join(contexts)})")
        for model in self._models:
            if not model.chats:
                who = model.name if self._whose(model) else "the model"
                self._say(f"{who} has no chat template: it completes texts, and conversations are refused")
        self._say(f"try it: {self._example(url)}")
        if self._options.uds is None:
            self._say(f"or in a browser: {url}/")

    def _example(self, url: str) -> str:
        """A command that asks this server something, ready to be pasted: lines of less than 100 columns."""
        model = next((model for model in self._models if model.chats), self._models[0])
        path, ask, most = "completions", '"prompt": "The capital of France is"', 20
        if model.chats:
            path, most = "chat/completions", 100
            ask = '"messages": [{"role": "user", "content": "What is the capital of France?"}]'
        named = [f'"model": {json.dumps(model.name)}'] if self._whose(model) else []
        body = ",\n  ".join([*named, ask, f'"max_tokens": {most}, "temperature": 0'])
        key = " \\\n  -H 'authorization: Bearer YOUR_KEY'" if self._options.api_key_file else ""
        if self._options.uds is not None:
            url = f"--unix-socket {shlex.quote(self._options.uds)} http://localhost"
        quoted = shlex.quote(f"{{\n  {body}\n}}")
        return f"curl {url}/v1/{path}{key} -d {quoted}"

    async def _mourn(self, model: HostedModel) -> None:
        """When an engine is gone, say so everywhere. The other models go on."""
        await model.link.ended()
        model.phase = Phase.DEAD
        assert model.link.failed is not None
        whose = f" of {model.name}" if self._whose(model) else ""
        others = "; the other models go on" if any(one.phase is not Phase.DEAD for one in self._models) else ""
        self._complain(f"the engine{whose} has stopped: {model.link.failed.message}{others}")

    @property
    def _active(self) -> int:
        """Requests that an engine may still answer."""
        return sum(link.active for link in self._links if not link.failed)

    async def _drain(self) -> None:
        """Let running requests finish, up to the deadline; new ones are answered 503 meanwhile."""
        seconds = self._options.shutdown_timeout
        for model in self._models:
            if model.phase is not Phase.DEAD:
                model.phase = Phase.DRAINING
        if self._active:
            self._say(f"stopping: {self._active} requests get up to {seconds:g} s; a second signal stops now")
        end = time.monotonic() + seconds
        while self._active and time.monotonic() < end:
            await asyncio.sleep(POLL_SECONDS)
        problem = "the server stopped before the request was complete"
        for link in self._links:
            link.end_all(ApiError(503, problem, code="shutting_down", retry_after=10))
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                while any(link.active for link in self._links):
                    await asyncio.sleep(POLL_SECONDS)

    async def _sample_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            self._fold(LoopLag(max(0.0, loop.time() - due)))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for connection in list(self._server.server_state.connections):
                connection.sweep(time.monotonic())  # type: ignore[union-attr]
