"""The life of a router: bind, listen to the replicas, pass on, drain, stop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from headway.client.upstream import Upstream
from headway.core.errors import BadInput
from headway.engine.machine import event_loop_factory
from headway.engine.transfer.ticket import read_secret
from headway.routing.policies import routing_named
from headway.routing.pools import PrefillReplicas
from headway.serve.app import Gate
from headway.serve.auth import Keys, read_keys
from headway.serve.cors import Cors
from headway.serve.limits import BodyBudget, raise_file_limit
from headway.serve.listening import POLL_SECONDS, listening, sample_lag, server_of, sweep, until_idle, url_of
from headway.serve.metrics import ServerMetrics
from headway.serve.quotas import Quotas
from headway.serve.route.app import RouterApi
from headway.serve.route.children import Children
from headway.serve.route.fleet import ReplicaFleet
from headway.serve.route.options import RouteOptions

Say = Callable[[str], None]


def run(options: RouteOptions, replicas: Sequence[str], say: Say = print, children: Children | None = None) -> int:
    """Route until a signal -> exit code.

    Args:
        replicas: URLs.
        children: replicas of its own, to be started, watched and stopped.

    Raises:
        BadInput: an option is at fault; nothing was started.
    """
    lines = read_keys(Path(options.api_key_file)) if options.api_key_file else []
    keys = Keys(lines, options.share_cache)
    if not replicas:
        raise BadInput("--replica", "give the URL of one replica at least, such as http://127.0.0.1:8001")
    if len(set(replicas)) < len(replicas):
        raise BadInput("--replica", "one is given twice")
    upstreams = [Upstream(url) for url in replicas]
    secret = read_secret(options.kv_secret_file) if options.kv_secret_file is not None else b""
    pool = PrefillReplicas(routing_named(options.policy), options.split_from) if secret else None
    text = next((line.text for line in lines if line.text), "")
    own = [(b"authorization", f"Bearer {text}".encode())] if text else []
    raise_file_limit()
    with (
        listening(options.host, options.port, options.uds, bool(keys)) as socks,
        asyncio.Runner(loop_factory=event_loop_factory()) as runner,
    ):
        fleet = ReplicaFleet(
            upstreams, routing_named(options.policy), options.most_in_flight, options.max_waiting, own,
            pool, secret,
        )  # fmt: skip
        url = f"unix:{options.uds}" if options.uds is not None else url_of(*socks[0].getsockname()[:2])
        return runner.run(_RouterLife(options, fleet, keys, say, children).live(socks, url))


class _RouterLife:
    def __init__(
        self, options: RouteOptions, fleet: ReplicaFleet, keys: Keys, say: Say, children: Children | None
    ) -> None:
        self._options, self._fleet, self._say, self._children = options, fleet, say, children
        self._metrics = ServerMetrics("")
        budget = BodyBudget(int(options.max_body_mib * 2**20))
        own = {tenant: quota.untokened for tenant, quota in keys.quotas.items()}
        self._api = RouterApi(fleet, self._metrics, budget, options.share_cache, Quotas(options.quota, own))
        self._server = server_of(
            Gate(self._api.routes(), self._metrics.fold, keys, Cors(options.cors_origin), options.root_path)
        )
        self._asked = asyncio.Event()
        self._signals = 0

    async def live(self, socks: Sequence[object], url: str) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number)
        serving = asyncio.create_task(self._server.serve(sockets=list(socks)))  # type: ignore[arg-type]
        tasks = [
            asyncio.create_task(work)
            for work in (self._fleet.watch(), sample_lag(self._metrics.fold), sweep(self._server))
        ]
        if self._children is not None:
            tasks.append(asyncio.create_task(self._children.watch(self._say)))
        try:
            await self._announce(url)
            await self._asked.wait()
            await self._drain()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._server.should_exit = True
            await serving
            self._fleet.close()
            if self._children is not None:
                await self._children.stop(self._options.shutdown_timeout)
        return 0 if self._children is None else self._children.code

    def _signalled(self, number: signal.Signals) -> None:
        self._signals += 1
        self._asked.set()
        if self._signals > 1:
            if self._children is not None:
                self._children.kill()
            os._exit(128 + number)

    async def _announce(self, url: str) -> None:
        """When a replica is up, or at once where they are not ours."""
        while self._children is not None and not self._fleet.ready and not self._asked.is_set():
            await asyncio.sleep(POLL_SECONDS)
        count = len(self._fleet.members)
        if not self._asked.is_set():
            what = "1 replica" if count == 1 else f"{count} replicas"
            self._say(f"serving {what} at {url}/v1 (policy {self._options.policy})")
            if self._options.uds is None:
                self._say(f"or in a browser: {url}{self._options.root_path}/")

    async def _drain(self) -> None:
        """Let what is here finish, up to the deadline."""
        self._api.draining = True
        seconds = self._options.shutdown_timeout
        if self._fleet.router.live:
            self._say(f"stopping: {len(self._fleet.router.live)} requests get up to {seconds:g} s")
        await until_idle(lambda: self._fleet.router.live, seconds)
        for member in self._fleet.members.values():
            for recall in list(member.recall.values()):
                recall("the router stopped before the request was complete")
        await until_idle(lambda: self._fleet.router.live, 1.0)
