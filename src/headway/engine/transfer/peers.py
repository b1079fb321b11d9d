"""An engine among others: the executor's half of the connector, between two steps.

a request with a ticket to send    its blocks are copied to the outbox as steps complete them, while later chunks of
                                   its prompt are computed
a request with a ticket to pull    waits; what comes is written to the cache, and when the last has come, or it is
                                   clear that it will not, the rest of the prompt is computed here
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from headway.cache.tier import TierKey
from headway.core.events import BlocksLoaded, BlocksSent, EventLog
from headway.core.request import Request
from headway.engine.messages import Submit
from headway.engine.transfer.give import Giver
from headway.engine.transfer.outbox import Outbox
from headway.engine.transfer.take import Pull
from headway.engine.transfer.ticket import Way, derived, read
from headway.ops.protocol import Backend
from headway.scheduling.scheduler import Scheduler

PIECE = 16 << 20  # bytes that are written to the cache at once
BESIDE, ALONE = 0.01, 0.1  # seconds of that between two steps: beside running requests, without any
IDLE = 0.005  # seconds to wait for news where nothing else is to be done
LEAST_PATIENCE, PATIENCE, UNKNOWN_PATIENCE = 2.0, 4.0, 30.0  # seconds, times what computing takes, seconds

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sending:
    """A prompt that is computed for another engine: names of its blocks, of each group the first that is of use, and
    how far it was copied."""

    ticket: bytes
    id: str
    names: Sequence[bytes]
    first: Sequence[int]
    next: int = 0


@dataclass(frozen=True)
class PeerSetup:
    """What makes engines peers.

    Attributes:
        secret: which all of a pool know.
        layout: hash of all that the bytes of a block depend on besides its name, 16 bytes.
        sizes: bytes of a block, per KV group.
        listen: host and port where others fetch blocks; None = nobody may.
        pulls: whether it fetches blocks itself.
    """

    secret: bytes
    layout: bytes
    sizes: Sequence[int]
    listen: tuple[str, int] | None = None
    pulls: bool = True
    outbox: Outbox = field(default_factory=Outbox)

    @property
    def key(self) -> bytes:
        """Secret of the blocks' names, the same in all engines of the pool."""
        return derived(self.secret, "names")


class PeerConnector:
    """The connector of one engine. Used by the thread that turns the loop.

    Args:
        scheduler: whose cache it is. backend: which holds that.
        clock: the engine's, ps. log: receives what is sent and what comes.
        evicted: called before a block is written; takes what had to go for it.

    Attributes:
        address: where others fetch blocks, "HOST:PORT"; "" = nowhere.

    Raises:
        BadInput: it cannot listen there.
    """

    def __init__(
        self, setup: PeerSetup, scheduler: Scheduler, backend: Backend, clock: Callable[[], int], log: EventLog,
        evicted: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._setup, self._scheduler, self._backend = setup, scheduler, backend
        self._now, self._log, self._evicted = clock, log, evicted
        self._outbox = setup.outbox
        self._tried: deque[tuple[int, int, float, str]] = deque()
        self._sending: list[_Sending] = []
        self._pulls: dict[str, tuple[Pull, float]] = {}  # by request, and when it is late
        self._news = threading.Condition()
        self._way: Way | None = None  # of the request that is about to be added
        self._giver: Giver | None = None
        if setup.listen is not None:
            self._giver = Giver(setup.listen, setup.secret, setup.layout, setup.sizes, self._outbox, self._tried)
        host, port = self._giver.address if self._giver else ("", 0)
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}" if host else ""

    def order(self, message: Submit) -> Submit:
        """A prompt that is to be sent is computed, and one token after it, which nobody needs."""
        self._way = read(message.transfer, self._setup.secret) if message.transfer else None
        message = replace(message, transfer="")
        if self._way is None:
            return message
        if self._way.source:
            return replace(message, remote=self._setup.pulls)
        return replace(message, params=replace(message.params, max_tokens=1, min_tokens=0))

    def added(self, message: Submit, request: Request) -> None:
        """Its blocks are to be sent from now on, or begin to come."""
        way, self._way = self._way, None
        if way is None:
            return
        scheduler, setup = self._scheduler, self._setup
        if not way.source:
            self._send(way.ticket, request)
        elif setup.pulls:
            wanted = scheduler.loading.missing(request.id)
            blocks = len({index for _, index, _ in wanted})
            computing = scheduler.seconds_to_compute(blocks * scheduler.cache.block_size)
            patience = max(LEAST_PATIENCE, PATIENCE * computing) if computing else UNKNOWN_PATIENCE
            pull = Pull(way, wanted, setup.secret, setup.layout, setup.sizes, self._news)
            self._pulls[request.id] = pull, pull.begin + patience

    def _send(self, ticket: bytes, request: Request) -> None:
        cache, row = self._scheduler.cache, self._scheduler.state.rows[request.id]
        names = row.table.name_blocks(request.tokens, (request.prompt_len - 1) // cache.block_size)
        first = [cache.first_needed(group, len(names) * cache.block_size) for group in range(len(cache.pools))]
        if self._giver is not None and self._outbox.open(ticket, request.id):
            self._sending.append(_Sending(ticket, request.id, tuple(names), first))

    # Between two steps

    def turn(self) -> None:
        for id in self._outbox.orphans():
            self._scheduler.cancel_request(id, self._now())
        self.save()
        waiting = self._scheduler.state.loads
        if self._pulls and len(waiting) == len(self._scheduler.state.rows):
            with self._news:
                if not any(pull.arrived or pull.ended for pull, _ in self._pulls.values()):
                    self._news.wait(IDLE)
        until = time.perf_counter() + (BESIDE if self._scheduler.running else ALONE)
        for id, (pull, late) in list(self._pulls.items()):
            if not self._scheduler.loading.waits(id):
                if pull.ended or id not in self._scheduler.state.rows:
                    pull.stop()
                    del self._pulls[id]
            elif time.perf_counter() < until:
                self._bring(id, pull, late)

    def _bring(self, id: str, pull: Pull, late: float) -> None:
        """A piece of what has come for a request."""
        wanted = {(group, index) for group, index, _ in self._scheduler.loading.missing(id)}
        room = [pool.available for pool in self._scheduler.cache.pools]
        here: list[tuple[int, int, np.ndarray]] = []
        ended, read, full = pull.ended, 0, False
        while read < PIECE and (one := pull.next()) is not None:
            group, index, data = one
            if (group, index) not in wanted:  # another request was quicker
                continue
            full = full or room[group] <= 0
            if full:
                break
            here.append(one)
            room[group] -= 1
            read += data.nbytes
        problem = pull.problem
        if full or (time.monotonic() > late and not ended):
            problem = "memory has no room for it" if full else "it takes longer than computing the prompt would"
            ended = True
        last = ended and (full or not pull.arrived)
        if not here and not last:
            return
        left = wanted - {(group, index) for group, index, _ in here}
        if last and left:
            logger.warning("a prompt is computed here though it was sent for: %s", problem or "a block was given up")
        blocks = self._scheduler.loading.load(
            BlocksLoaded(
                now=self._now(),
                id=id,
                blocks=tuple([(group, index) for group, index, _ in here]),
                bytes=read,
                seconds=time.monotonic() - pull.begin if last else 0.0,
                last=last,
                failed=last and bool(left),
                remote=True,
                recomputed=len({index for _, index in left}) * self._scheduler.cache.block_size if last else 0,
            )
        )
        self._evicted()
        for (group, _, data), block in zip(here, blocks, strict=True):
            self._backend.write_block(group, block, data)
        if last:
            pull.stop()
            del self._pulls[id]

    def save(self) -> None:
        """Copy what was computed for others."""
        for sending in list(self._sending):
            live = sending.id in self._scheduler.state.rows
            self._copy(sending)
            if not live:
                self._outbox.finish(sending.ticket)
            if not live or not self._outbox.is_open(sending.ticket):
                self._sending.remove(sending)
        while self._tried:
            blocks, size, seconds, problem = self._tried.popleft()
            self._log.append(BlocksSent(now=self._now(), blocks=blocks, bytes=size, seconds=seconds, problem=problem))

    def _copy(self, sending: _Sending) -> None:
        pools, sizes = self._scheduler.cache.pools, self._setup.sizes
        for index in range(sending.next, len(sending.names)):
            name = sending.names[index]
            groups = [group for group, first in enumerate(sending.first) if index >= first]
            if any(name not in pools[group].by_name for group in groups):
                return
            wanted = [group for group in groups if self._outbox.wants(sending.ticket, TierKey(name, group))]
            if not self._outbox.has_room(sum(sizes[group] for group in wanted)):
                return
            for group in wanted:
                data = np.empty(sizes[group], np.uint8)
                self._backend.read_block(group, pools[group].by_name[name], data)
                self._outbox.put(sending.ticket, TierKey(name, group), data)
            sending.next = index + 1

    def close(self) -> None:
        """End all transfers. Idempotent."""
        if self._giver is not None:
            self._giver.close()
        for pull, _ in self._pulls.values():
            pull.stop()
        self._pulls.clear()
        self._outbox.close()
