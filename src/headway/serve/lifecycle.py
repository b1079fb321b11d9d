"""The life of a server: bind, load, serve, drain, stop; and the exit code that says how it ended.

0  stopped when asked, after draining            2  an option or the model is at fault
1  the engine died                               128 + signal  a second signal: stopped at once
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from headway.core.bound import QueueBound
from headway.core.errors import BadInput
from headway.engine.machine import event_loop_factory
from headway.engine.options import EngineOptions
from headway.serve.admission import Backlog
from headway.serve.app import Api, Gate, Phase
from headway.serve.auth import Keys, is_loopback, read_keys
from headway.serve.cors import Cors
from headway.serve.errors import ApiError
from headway.serve.limits import BodyBudget, raise_file_limit
from headway.serve.link import EngineLink
from headway.serve.metrics import LoopLag, Metrics
from headway.serve.options import ServeOptions
from headway.serve.protocol import SWEEP_SECONDS, GuardedProtocol
from headway.serve.text import Text

LAG_SECONDS = 0.1  # how often the event loop's lag is sampled
POLL_SECONDS = 0.05
LINGER_SECONDS = 1.0  # after the engine's death: streams get their error, probes see /health fail
CLOSE_SECONDS = 3  # connections that do not close by themselves

log = logging.getLogger("headway.serve")


def _complain(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class Served:
    """What a server serves, and where it speaks to its operator.

    Attributes:
        model: the name clients use.
        engine_command: starts the engine process.
        engine_options: one line of JSON for it.
        queue: the bound on what waits.
        load_text: makes the text side; called in a thread.
        chats: whether the model has a chat template.
        say, complain: print a line for the operator: how things go, and why the engine is gone.
    """

    model: str
    engine_command: Sequence[str] = (sys.executable, "-m", "headway.engine.process")
    engine_options: bytes = b"{}"
    queue: QueueBound = EngineOptions().queue
    load_text: Callable[[], Text]
    chats: bool = True
    say: Callable[[str], None] = print
    complain: Callable[[str], None] = _complain


def run(options: ServeOptions, served: Served) -> int:
    """Serve until a signal or the engine's death -> exit code.

    Raises:
        BadInput: an option is at fault; nothing was started.
    """
    keys = Keys(read_keys(Path(options.api_key_file))) if options.api_key_file else Keys()
    host = options.host[1:-1] if options.host.startswith("[") and options.host.endswith("]") else options.host
    if not host:
        raise BadInput("--host", "it is empty; 0.0.0.0 and :: are all addresses")
    if not keys and not is_loopback(host):
        raise BadInput("--host", f"{host} can be reached by others; also give --api-key-file, or use 127.0.0.1")
    raise_file_limit()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # texts are encoded in our own threads, beside a busy engine
    with ExitStack() as closing, asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        socks = [closing.enter_context(sock) for sock in _bind(host, options.port)]
        return runner.run(_Life(options, served, keys, socks).live())


def _bind(host: str, port: int) -> list[socket.socket]:
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


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the first signal here means drain."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Life:
    def __init__(self, options: ServeOptions, served: Served, keys: Keys, socks: Sequence[socket.socket]) -> None:
        self._options = options
        self._served = served
        self._socks = list(socks)
        self._signals: list[signal.Signals] = []
        self._asked = asyncio.Event()
        metrics = Metrics(served.model)
        self._fold = metrics.fold
        backlog = Backlog(served.queue)
        self._link = EngineLink(served.engine_command, served.engine_options, backlog, metrics.fold)
        budget = BodyBudget(int(options.max_body_mib * 2**20))
        self._api = Api(
            self._link, metrics, budget, served.model, int(time.time()), options.stall_timeout, _lora_folder(options)
        )
        config = uvicorn.Config(
            Gate(self._api, keys, Cors(options.cors_origin)),
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
        self._server = _Server(config)

    async def live(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number)
        await self._link.start()
        serving = asyncio.create_task(self._server.serve(sockets=self._socks))
        watches = [asyncio.create_task(self._sample_lag()), asyncio.create_task(self._sweep())]
        try:
            return await self._serve()
        finally:
            for watch in watches:
                watch.cancel()
            self._server.should_exit = True
            await serving
            await self._link.stop()
            self._api.close()

    def _signalled(self, number: signal.Signals) -> None:
        self._signals.append(number)
        self._asked.set()
        if len(self._signals) > 1:  # now: nothing is waited for, nothing is left behind
            self._served.say("second signal: stopping at once")
            self._link.kill()
            self._link.remove_folder()
            os._exit(128 + number)

    async def _serve(self) -> int:
        text = asyncio.create_task(asyncio.to_thread(self._served.load_text))
        asked = asyncio.create_task(self._asked.wait())
        settled = asyncio.create_task(self._link.settled())
        await asyncio.wait((settled, asked), return_when=asyncio.FIRST_COMPLETED)
        if not self._link.failed and self._link.ready:
            self._api.opened(await text, self._link.ready)
            self._announce()
            gc.collect()
            gc.freeze()
            ended = asyncio.create_task(self._link.ended())
            await asyncio.wait((ended, asked), return_when=asyncio.FIRST_COMPLETED)
        if self._link.failed and not self._signals:
            return await self._fail()
        await self._drain()
        return 1 if self._link.failed else 0

    def _announce(self) -> None:
        ready = self._link.ready
        assert ready is not None
        host, port = self._socks[0].getsockname()[:2]
        for line in ready.notes:
            self._served.say(line)
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._served.say(f"serving {self._served.model} at {url}/v1 (context {ready.max_model_len} tokens)")
        if not self._served.chats:
            self._served.say("the model has no chat template: it completes texts, and conversations are refused")
        self._served.say(f"try it: {self._example(url)}")

    def _example(self, url: str) -> str:
        """A command that asks this server something, ready to be pasted."""
        path, body = "completions", '{"prompt": "The capital of France is", "max_tokens": 20, "temperature": 0}'
        if self._served.chats:
            path = "chat/completions"
            body = '{"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}'
        key = " -H 'authorization: Bearer YOUR_KEY'" if self._options.api_key_file else ""
        return f"curl {url}/v1/{path} -H 'content-type: application/json'{key} -d '{body}'"

    async def _fail(self) -> int:
        """The engine is gone: say so everywhere, then end."""
        failed = self._link.failed
        assert failed is not None
        was_open = self._api.phase is Phase.READY
        self._api.phase = Phase.DEAD
        self._served.complain(f"the engine has stopped: {failed.message}" if was_open else failed.message)
        if was_open:
            await asyncio.sleep(LINGER_SECONDS)
        return 1 if was_open else failed.exit_code or 1

    async def _drain(self) -> None:
        """Let running requests finish, up to the deadline; new ones are answered 503 meanwhile."""
        seconds = self._options.shutdown_timeout
        self._api.phase = Phase.DRAINING
        if self._link.active:
            self._served.say(
                f"stopping: {self._link.active} requests get up to {seconds:g} s; a second signal stops now"
            )
        end = time.monotonic() + seconds
        while self._link.active and time.monotonic() < end and not self._link.failed:
            await asyncio.sleep(POLL_SECONDS)
        if self._link.active:
            problem = "the server stopped before the request was complete"
            self._link.end_all(ApiError(503, problem, code="shutting_down", retry_after=10))
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    while self._link.active:
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
