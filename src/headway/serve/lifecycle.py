"""The life of a server: bind, load, serve, drain, stop; and the exit code that says how it ended.

0  stopped when asked, after draining            2  an option or a model is at fault
1  an engine died (of several: and then a stop)  128 + signal  a second signal: stopped at once
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from headway.core.errors import BadInput
from headway.engine.ipc import Failed
from headway.engine.machine import event_loop_factory
from headway.report.prose import folded
from headway.serve.app import Api, Gate
from headway.serve.auth import Keys, read_keys
from headway.serve.cors import Cors
from headway.serve.errors import ApiError
from headway.serve.hosted import HostedModel, Phase, Served
from headway.serve.limits import BodyBudget, raise_file_limit
from headway.serve.listening import CLOSE_SECONDS, listening, sample_lag, server_of, sweep, until_idle, url_of
from headway.serve.metrics import ServerMetrics
from headway.serve.options import ServeOptions
from headway.serve.quotas import Quotas
from headway.serve.tracing import Tracer

LINGER_SECONDS = 1.0  # after the engine's death: streams get their error, probes see /health fail

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
    raise_file_limit()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # texts are encoded in our own threads, beside a busy engine
    with (
        listening(options.host, options.port, options.uds, bool(keys)) as socks,
        asyncio.Runner(loop_factory=event_loop_factory()) as runner,
    ):
        return runner.run(_Life(options, served, keys, socks, say, complain).live())


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
        watches = [asyncio.create_task(sample_lag(self._fold)), asyncio.create_task(sweep(self._server))]
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
            ask = '"messages": [{"role": "user", "content": "Why is the sky blue?"}]'
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
        await until_idle(lambda: self._active, seconds)
        problem = "the server stopped before the request was complete"
        for link in self._links:
            link.end_all(ApiError(503, problem, code="shutting_down", retry_after=10))
        await until_idle(lambda: any(link.active for link in self._links), CLOSE_SECONDS)
