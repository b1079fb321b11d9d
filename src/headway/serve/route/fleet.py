"""The replicas behind a router, as a running process sees them: heartbeats, what they say of themselves, who waits."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec

from headway.client.upstream import Headers, Upstream, UpstreamError
from headway.client.watch import parse
from headway.core.clock import to_seconds
from headway.core.errors import BadInput, HeadwayError
from headway.engine.machine import wall_clock
from headway.engine.transfer.ticket import TICKET_BYTES, Way, host_port, signed
from headway.routing.index import USUAL_BLOCKS
from headway.routing.policies.policy import RoutingPolicy
from headway.routing.pools import PrefillReplicas
from headway.routing.replica import per_token
from headway.routing.request import RoutedRequest
from headway.routing.router import RequestRouter
from headway.serve.errors import ApiError
from headway.serve.metrics import Series, escape
from headway.serve.route.prompts import BLOCK_TOKENS

MOST_BLOCKS = 1 << 22  # that are remembered of a replica, whatever it says
BEAT_SECONDS = 1.0
BEAT_TIMEOUT = 3.0
FIRST_GUESS = 1e-4  # seconds per prompt token; how fast a replica is, is learned
RUNNING = ("headway:requests_running", "vllm:num_requests_running", "sglang:num_running_reqs")
WAITING = ("headway:requests_waiting", "vllm:num_requests_waiting", "sglang:num_queue_reqs")
CAPACITY = "sglang:max_total_num_tokens"
log = logging.getLogger("headway.serve")

_BLOCKS = re.compile(r'cache_config_info\{[^}]*?block_size="(\d{1,6})"[^}]*?num_gpu_blocks="(\d{1,12})"')
_BLOCKS_TURNED = re.compile(r'cache_config_info\{[^}]*?num_gpu_blocks="(\d{1,12})"[^}]*?block_size="(\d{1,6})"')


class Member:
    """A replica.

    Attributes:
        drained_by_hand: somebody asked for it. leaving: it says so itself. starts: it was never heard of, and may be a
            child of ours that loads its model: nothing to warn of.
        role, address: its pool, and where engines fetch blocks from it; "" = nowhere.
        recall: by request, ends what has not begun when the replica is dead.
    """

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.name = upstream.url
        self.drained_by_hand = False
        self.role, self.address = "both", ""
        self.leaving = False
        self.starts = upstream.url.startswith("unix:")
        self.recall: dict[str, Callable[[str], None]] = {}


class Help(NamedTuple):
    """Another replica computes the prompt of a request: who, and what it and the one that answers are told."""

    member: Member
    send: str
    pull: str


class ReplicaFleet:
    """Replicas, and the requests that wait for one.

    Args:
        upstreams: where the replicas are.
        most: requests that each has at once; the others wait here.
        most_waiting: of these.
        headers: of the questions that it asks itself.
        pool: gets the replicas that say that they are of the prefill pool; None = they answer like others.
        secret: by which the pools know each other.
    """

    def __init__(
        self, upstreams: Sequence[Upstream], policy: RoutingPolicy, most: int | None, most_waiting: int,
        headers: Headers = (), pool: PrefillReplicas | None = None, secret: bytes = b"",
    ) -> None:  # fmt: skip
        self.router = RequestRouter(policy, most_waiting=most_waiting)
        self.pool, self._secret = pool, secret
        self.members = {upstream.url: Member(upstream) for upstream in upstreams}
        self._headers = headers
        self._clock = wall_clock()
        self._waiters: dict[str, asyncio.Future[Member]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._counts: Counter[tuple[str, str]] = Counter()
        for name in self.members:
            self.router.join(name, per_token(FIRST_GUESS), self.now(), most=most)
            self.router.lose(name)  # until it is heard of
            if pool is not None:
                pool.router.join(name, per_token(FIRST_GUESS), self.now(), most=most)
                pool.router.lose(name)

    def now(self) -> int:
        return self._clock.now()

    # Requests

    async def place(self, request: RoutedRequest, again: bool = False) -> Member:
        """A replica for a request, when there is room. `again`: another one has failed it.

        Raises:
            HeadwayError: there is none, too many wait, or its deadline has passed.
        """
        if not again:
            self.router.offer(request)
        waiter = self._waiters[request.id] = asyncio.get_running_loop().create_future()
        try:
            self.pump()
            return await waiter
        finally:
            self._waiters.pop(request.id, None)

    def pump(self) -> None:
        """Something has changed: say who goes where."""
        now = self.now()
        for request in self.router.expired(now):
            late = request.deadline is not None and request.deadline <= now
            problem = "no replica had room in time" if late else "no replica is left that could answer"
            code = "deadline_exceeded" if late else "no_replica"
            self._tell(request.id, ApiError(503, problem, code=code, retry_after=5))
        for request, replica in self.router.dispatch(now):
            self._counts["placed", replica.name] += 1
            self._tell(request.id, self.members[replica.name])
        deadline = self.router.next_deadline
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            later = max(0.0, to_seconds(deadline - now)) + 0.001
            self._timer = asyncio.get_running_loop().call_later(later, self.pump)

    def _tell(self, id: str, what: Member | HeadwayError) -> None:
        waiter = self._waiters.get(id)
        if waiter is None or waiter.done():
            self.router.end(id, self.now())  # its client has gone meanwhile
        elif isinstance(what, Member):
            waiter.set_result(what)
        else:
            waiter.set_exception(what)

    def help(self, request: RoutedRequest) -> Help | None:
        """Who computes the prompt of a request that was just placed, if not the replica that has it."""
        replica = self.pool.assign(request, self.now()) if self.pool is not None else None
        if replica is None:
            return None
        member, ticket = self.members[replica.name], secrets.token_bytes(TICKET_BYTES)
        self._counts["helped", replica.name] += 1
        ways = Way(ticket), Way(ticket, member.address)
        return Help(member, *(signed(way, self._secret) for way in ways))

    def helped(self, id: str, begun: bool) -> None:
        """That has computed it, or it will not. Idempotent."""
        if self.pool is not None and begun:
            self.pool.computed(id, self.now())
        elif self.pool is not None:
            self.pool.release(id, self.now())

    def begin(self, id: str) -> None:
        """The first token of a request is here."""
        self.router.begin(id, self.now())

    def end(self, id: str) -> None:
        """A request is over. Idempotent."""
        self.router.end(id, self.now())
        self.pump()

    def fail(self, id: str, member: Member, reached: bool) -> bool:
        """A replica has failed a request -> whether it is to be placed again. `reached`: it took the request at all."""
        if not reached:
            self._lost(member)
        again = self.router.fail(id, self.now())
        self._counts["retried" if again else "failed", member.name] += 1
        self.pump() if not again else None
        return again

    # Replicas

    async def watch(self) -> None:
        """Listen to all of them, for ever."""
        async with asyncio.TaskGroup() as tasks:
            for member in self.members.values():
                tasks.create_task(self._listen(member))
            tasks.create_task(self._check())

    async def _listen(self, member: Member) -> None:
        said = ""
        while True:
            problem = ""
            try:
                async with asyncio.timeout(BEAT_TIMEOUT):
                    problem = await self._beat(member)
            except (UpstreamError, ValueError) as error:  # a hostile replica's figures, too
                problem = str(error)
            except TimeoutError:
                problem = f"{member.name} has not answered within {BEAT_TIMEOUT:g} s"
            if problem not in ("", said):
                log.log(logging.DEBUG if member.starts else logging.WARNING, "no heartbeat of a replica: %s", problem)
            said = problem
            self.pump()
            await asyncio.sleep(BEAT_SECONDS)

    async def _beat(self, member: Member) -> str:
        """Ask a replica how it is -> why that does not count as a sign of life; "" if it does.

        Raises:
            UpstreamError: it does not answer.
        """
        status, _ = await member.upstream.get(b"/health")
        if status != 200:
            return f"{member.name} answers /health with {status}"
        ready, said = await member.upstream.get(b"/ready")  # 404: not one of ours
        member.leaving = ready == 503
        if ready == 200:
            member.role, member.address = pool_of(said)
        helps = self._helps(member)
        routers = [self.router] if self.pool is None else [self.router, self.pool.router]
        replica = routers[-1 if helps else 0].replicas[member.name]
        before = len(replica.requests)
        status, body = await member.upstream.get(b"/metrics", self._headers)
        others = None
        if status == 200:
            requests, blocks = reported(body.decode(errors="replace"))
            others = max(0, requests - max(before, len(replica.requests)))
            for router in routers:
                router.index.add(replica.number, blocks)
        member.starts = False
        if not replica.alive:
            log.info("%s is up", member.name)
        for router, takes in zip(routers, (not helps, helps), strict=False):
            router.heard(member.name, self.now(), others if takes else None)
            router.drain(member.name, member.leaving or member.drained_by_hand or not takes)
        return ""

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            if self.pool is not None:
                self.pool.router.check(self.now())
            for name in self.router.check(self.now()):
                log.warning("%s has fallen silent: it gets no requests until it is heard of again", name)
                self._recall(self.members[name])
            self.pump()

    def _lost(self, member: Member) -> None:
        log.warning("%s is taken for dead: it takes no requests", member.name)
        self.router.lose(member.name)
        if self.pool is not None:
            self.pool.router.lose(member.name)

    def _recall(self, member: Member) -> None:
        """It has fallen silent: what has not begun there is tried elsewhere, what has goes on if it can."""
        replica = self.router.replicas[member.name]
        for id, recall in list(member.recall.items()):
            if id in replica.requests and not replica.requests[id].begun:
                recall("the replica has fallen silent")

    def drain(self, name: str, draining: bool) -> None:
        """
        Raises:
            BadInput: there is no such replica.
        """
        self.router.drain(name, draining or self._helps(self.members[name]))
        if self.pool is not None:
            self.pool.router.drain(name, draining or not self._helps(self.members[name]))
        self.members[name].drained_by_hand = draining
        self.pump()

    def _helps(self, member: Member) -> bool:
        """It computes prompts for others, and answers none."""
        return self.pool is not None and member.role == "prefill" and bool(member.address)

    @property
    def up(self) -> bool:
        """Some replica takes requests."""
        return any(replica.open for replica in self.router.replicas.values())

    @property
    def ready(self) -> bool:
        """Some replica takes requests, and each that helps it has said so."""
        waited = self.pool is not None and not any(one.open for one in self.pool.router.replicas.values())
        return self.up and not waited

    def others(self, but: Sequence[str] = ()) -> list[Member]:
        """Replicas to be asked about something that any of them knows, those that live first."""
        replicas = sorted(self.router.replicas.values(), key=lambda one: (not one.alive, one.draining, one.load))
        return [self.members[one.name] for one in replicas if one.name not in but]

    def about(self) -> list[dict[str, object]]:
        """What is known of each, for people."""
        now = self.now()
        return [
            {
                "replica": one.name, "role": self.members[one.name].role, "alive": one.alive, "draining": one.draining,
                "drained": self.router.drained(one.name), "requests": len(one.requests), "others": one.others,
                "queue_seconds": round(one.queue_seconds(now), 6), "known_blocks": self.router.index.count(one.number),
            }
            for one in self.router.replicas.values()
        ]  # fmt: skip

    def series(self) -> Iterator[Series]:
        """For /metrics."""
        now, replicas = self.now(), self.router.replicas.values()
        gauge, counter = "gauge", "counter"
        waiting = "Requests that wait at the router."
        yield Series("headway:router_requests_waiting", gauge, waiting, "", self.router.waiting)
        for name, text, values in (
            ("up", "1: it is heard of.", [int(one.alive) for one in replicas]),
            ("draining", "1: it takes no new requests.", [int(one.draining) for one in replicas]),
            ("requests", "Requests that it has from this router.", [len(one.requests) for one in replicas]),
            ("requests_other", "Requests that it has from elsewhere.", [one.others for one in replicas]),
            ("waiting_tokens", "Prompt tokens before first tokens.", [one.waiting_tokens for one in replicas]),
            ("queue_seconds", "Predicted work before a newcomer's.", [one.queue_seconds(now) for one in replicas]),
            ("known_blocks", f"Blocks of {BLOCK_TOKENS} tokens that it is known to hold.",
             [self.router.index.count(one.number) for one in replicas]),
        ):  # fmt: skip
            named = {_label(one.name): float(value) for one, value in zip(replicas, values, strict=True)}
            yield Series(f"headway:router_replica_{name}", gauge, text, "", named)
        for what, text in (("placed", "Requests sent to it."), ("retried", "Requests that it failed, tried elsewhere."),
                           ("failed", "Requests that it failed, and nobody else had."),
                           ("helped", "Prompts sent to it whose requests others answer.")):  # fmt: skip
            counts = {_label(one.name): float(self._counts[what, one.name]) for one in replicas}
            yield Series(f"headway:router_{what}_total", counter, text, "", counts)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for member in self.members.values():
            member.upstream.close()


def _label(name: str) -> str:
    return f'replica="{escape(name)}"'


def pool_of(said: bytes) -> tuple[str, str]:
    """What a replica says of its pool: role, and where engines fetch blocks. Others' servers say nothing."""
    try:
        told = msgspec.json.decode(said, type=_Told)
        if told.kv:
            host_port(told.kv, "kv")
    except (msgspec.DecodeError, BadInput, RecursionError):
        return "both", ""
    return (told.role, told.kv) if told.kv.isascii() and " " not in told.kv else ("both", "")


class _Told(msgspec.Struct):
    role: Literal["both", "prefill", "decode"] = "both"
    kv: Annotated[str, msgspec.Meta(max_length=256)] = ""


def reported(text: str) -> tuple[int, int]:
    """What a replica's metrics say, whoever's they are: requests that it has, and blocks of `BLOCK_TOKENS` tokens that
    its cache holds, or as many as is usual if they do not say. What is infinite or no number counts as not said."""
    values = {name: value for name, value in parse(text, 0.0).values.items() if math.isfinite(value)}
    requests = sum(next((values[name] for name in names if name in values), 0.0) for names in (RUNNING, WAITING))
    tokens = values.get(CAPACITY, 0.0)
    for pattern in (_BLOCKS, _BLOCKS_TURNED):
        found = pattern.search(text)
        if found is not None:
            tokens = float(int(found[1]) * int(found[2]))
    return max(0, int(requests)), min(MOST_BLOCKS, max(1, int(tokens) // BLOCK_TOKENS)) if tokens else USUAL_BLOCKS
