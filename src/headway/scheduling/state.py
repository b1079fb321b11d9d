"""Who is where. Every move of a request between its places is one function here, and blocks move nowhere else:

                 add                admit                 finish
       (caller) -----> WAITING -----------------> RUNNING -------> (gone)
          |               ^ ^------- preempt -------'                ^
          '--> FORKING ---'      cancel, deadline, from anywhere ----'
         (choices 1..n-1 wait there until the prompt of choice 0 is computed)

A request whose prompt goes on in the cache's second tier leaves WAITING for LOADING until those blocks are back.

Only RUNNING rows own blocks. Those of a row that ends while plans are in flight are kept until the last of these is
committed, because the executor may still write them.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

import msgspec

from headway.cache.kv import Hit, KVCache
from headway.cache.table import BlockTable
from headway.core.clock import to_ps
from headway.core.events import Admitted, EventLog, Finished, Preempted, Queued
from headway.core.request import Finish, Request
from headway.core.step import BlockCopy, Capabilities
from headway.scheduling.flight import Flight
from headway.scheduling.queue import AdmissionQueue
from headway.scheduling.row import STRICT_AFTER, Place, Row


class Emission(msgspec.Struct, frozen=True, gc=False):
    """What happened to a request that its client should hear of.

    Attributes:
        request: the request itself.
        tokens: ids emitted by this step, in order; already appended to `request.tokens`.
        finish: set when it ended with them.
    """

    request: Request
    tokens: tuple[int, ...] = ()
    finish: Finish | None = None


class State:
    """All live requests, in their places, the cache, and the plans in flight.

    Attributes:
        limits: what the executor can hold and do.
        rows: every live row, by id.
        choices: the live rows of a request, by its id.
        queue, running: the places; `running` is sorted by `Row.rank`. Choices that wait for a prompt are in its row's
            `forks`.
        loads: rows that wait for blocks to be loaded, by id, and which: (group, index). First come, first served.
        waiting_tokens: prompt tokens of all rows that are not running.
        flights: plans whose results are not committed yet, oldest first.
        gone: ids the executor holds and must drop with the next plan.
        emissions: what the engine has not taken yet.
        accounts: predicted seconds of each tenant's work; kept by the policy `fair`.
        ttft: ps in which a request should have its first token, for the policy `slo`; None = no target.
    """

    def __init__(
        self,
        limits: Capabilities,
        cache: KVCache,
        log: EventLog | None,
        max_wait: float | None = None,
        strict_after: int | None = STRICT_AFTER,
        ttft: int | None = None,
    ) -> None:
        self.limits = limits
        self.cache = cache
        self.log = log
        self.rows: dict[str, Row] = {}
        self.choices: dict[str, list[Row]] = {}
        self.queue = AdmissionQueue()
        self.running: list[Row] = []
        self.loads: dict[str, tuple[Row, Sequence[tuple[int, int]]]] = {}
        self.waiting_tokens = 0
        self.flights: deque[Flight] = deque()
        self.gone: list[str] = []
        self.emissions: list[Emission] = []
        self.accounts: dict[str, float] = {}
        self.ttft = ttft
        self._max_wait = max_wait
        self._strict_after = strict_after
        self._deadlines: list[tuple[int, int, bool, Row]] = []  # (when, number, of waiting only, row)
        self._added = 0
        self._tenants: dict[str, int] = {}  # numbers of tenants in the log

    def add(self, request: Request) -> None:
        """A new request; choices other than the first wait for their parent's prompt."""
        parent = self.rows.get(request.parent) if request.parent else None
        row = Row(
            request, BlockTable(self.cache, request.namespace, request.adapter, request.prompt_len), self._added, parent
        )
        self._added += 1
        self.rows[request.id] = row
        self.choices.setdefault(request.request_id, []).append(row)
        self.waiting_tokens += request.prompt_len
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, row.number, False, row))
        if self._max_wait is not None:
            heapq.heappush(self._deadlines, (request.arrival + to_ps(self._max_wait), row.number, True, row))
        if parent is None:
            self.queue.push(row)
        else:
            row.place = Place.FORKING
            parent.forks.append(row)
        if self.log:
            number = self._tenants.setdefault(request.tenant, len(self._tenants))
            self.log.append(_queued(row, self.cache.block_size, number))

    def admit(self, row: Row, hit: Hit, fork: bool, now: int) -> tuple[BlockCopy, ...]:
        """WAITING -> RUNNING, starting from a cached prefix, or, as a fork, from the prompt of its parent (whose full
        blocks it shares; the part-filled one is copied: returns the copies to make)."""
        request = row.request
        self.queue.remove(row)
        self.waiting_tokens -= request.prompt_len
        row.table.adopt(hit)
        request.computed = hit.length * self.cache.block_size
        copies: tuple[BlockCopy, ...] = ()
        if fork:
            assert row.parent is not None
            copies = row.table.copy_partial(row.parent.table, request.prompt_len - 1)
            request.computed = request.prompt_len - 1
        if request.preemptions == 0:
            request.cached = request.computed
        row.place = Place.RUNNING
        insort(self.running, row, key=lambda row: row.rank)
        if self.log:
            self.log.append(
                Admitted(
                    now=now,
                    id=request.id,
                    cached=request.computed,
                    preemptions=request.preemptions,
                    waited=now - request.arrival,
                )
            )
        return copies

    def await_load(self, row: Row, loads: Sequence[tuple[int, int]], now: int) -> None:
        """WAITING -> LOADING, until these blocks (group, index) are in memory."""
        self.queue.remove(row)
        row.place = Place.LOADING
        self.loads[row.request.id] = row, loads
        self._refresh(row, loads, now)

    def loaded(self, row: Row, now: int) -> None:
        """LOADING -> WAITING, in its old place in the order."""
        _, loads = self.loads.pop(row.request.id)
        self._refresh(row, loads, now)
        row.place = Place.WAITING
        self.queue.push(row)

    def _refresh(self, row: Row, loads: Sequence[tuple[int, int]], now: int) -> None:
        """What memory has of the prefix up to the last of these blocks is kept longest."""
        count = 1 + max([index for _, index in loads], default=-1)
        self.cache.refresh(row.table.name_blocks(row.request.tokens, count), now)

    def outgrown(self, row: Row) -> bool:
        """Whether a running row knows so many tokens by now that all of it is computed with other positions."""
        return self.cache.is_long(len(row.request.tokens)) and not row.table.long

    def preempt(self, row: Row, now: int) -> None:
        """RUNNING -> WAITING: give the blocks back and compute again later, in its old place in the order."""
        assert not self.flights, "blocks are taken back between steps only"
        request = row.request
        if self.log:
            self.log.append(Preempted(now=now, id=request.id, wasted=request.computed))
        self._stop_running(row, now)
        row.table.begin_again(len(request.tokens))
        request.computed = 0
        request.draft = []
        request.preemptions += 1
        row.strict = self._strict_after is not None and request.preemptions >= self._strict_after
        row.place = Place.WAITING
        self.waiting_tokens += request.prompt_len
        self.queue.push(row)

    def finish(self, row: Row, finish: Finish, now: int) -> None:
        """From anywhere -> gone, giving every block back. Choices that still wait for this one's prompt need wait no
        longer."""
        request = row.request
        request.finish = finish
        full = len(request.tokens) // self.cache.block_size
        names = tuple(row.table.name_blocks(request.tokens, full)) if self.log else ()
        if row.place is Place.RUNNING:
            self._stop_running(row, now)
        else:
            self.waiting_tokens -= request.prompt_len
            if row.place is Place.WAITING:
                self.queue.remove(row)
            elif row.place is Place.LOADING:
                del self.loads[request.id]
            elif row.parent is not None:
                row.parent.forks.remove(row)
        self._forget(row)
        self.release_forks(row)
        if self.log:
            self.log.append(
                Finished(
                    now=now,
                    id=request.id,
                    reason=finish.reason,
                    prompt_tokens=request.prompt_len,
                    cached=request.cached,
                    generated=request.generated,
                    lived=now - request.arrival,
                    names=names,
                )
            )

    def abort(self, row: Row, why: str | None, now: int) -> None:
        """Finish for a reason outside of the step, and let the client know."""
        finish = Finish("abort", why)
        self.finish(row, finish, now)
        self.emissions.append(Emission(row.request, (), finish))

    def abort_expired(self, now: int) -> None:
        """Abort every request whose deadline has passed. O(1) when none has."""
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            _, _, waiting, row = self._deadlines[0]
            self.abort(row, f"waited {self._max_wait:g} s in the queue" if waiting else "deadline exceeded", now)

    def next_deadline(self) -> int | None:
        """The earliest deadline of a live request, ps."""
        while self._deadlines:
            deadline, _, waiting, row = self._deadlines[0]
            admitted = row.place is Place.RUNNING or row.request.preemptions > 0
            if row.request.finish is None and not (waiting and admitted):
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def land(self, flight: Flight, now: int) -> None:
        """The executor is done with a plan: rows that ended meanwhile give their blocks back."""
        for table in flight.tables:
            table.release(now)
        flight.tables.clear()

    def void(self, flights: list[Flight], now: int) -> None:
        """The executor holds no row any more, and nobody knows how far it came with these plans, the last of which are
        still in flight. What they ordered never happened: rows that own a copied block, which may not have been made,
        start again."""
        for flight in self.flights:
            for row, work in zip(flight.rows, flight.plan.work, strict=True):
                row.request.pending -= work.count
        self.flights.clear()
        self.gone.clear()
        for row in self.running:
            row.held = False
        for flight in flights:
            self.land(flight, now)
            for row in flight.copied:
                if row.place is Place.RUNNING and row.request.finish is None:
                    self.preempt(row, now)

    def release_forks(self, parent: Row) -> None:
        """FORKING -> WAITING for the choices that waited for `parent`. Their order puts them before later arrivals."""
        for row in parent.forks:
            row.place = Place.WAITING
            row.table.names = parent.table.names[: row.request.prompt_len // self.cache.block_size]
            self.queue.push(row)
        parent.forks = []

    def _forget(self, row: Row) -> None:
        request = row.request
        del self.rows[request.id]
        if not self.rows:
            self.accounts.clear()
        siblings = self.choices[request.request_id]
        siblings.remove(row)
        if not siblings:
            del self.choices[request.request_id]

    def _stop_running(self, row: Row, now: int) -> None:
        del self.running[bisect_left(self.running, row.rank, key=lambda row: row.rank)]
        if self.flights:
            self.flights[-1].tables.append(row.table)
        else:
            row.table.release(now)
        if row.held:
            row.held = False
            self.gone.append(row.request.id)


def _queued(row: Row, block_size: int, tenant: int) -> Queued:
    """The names of a prompt are those of its first choice."""
    request = row.request
    names = row.table.name_blocks(request.tokens, request.prompt_len // block_size) if row.parent is None else ()
    return Queued(
        now=request.arrival,
        id=request.id,
        number=row.number,
        prompt_tokens=request.prompt_len,
        max_len=request.max_len,
        min_tokens=request.params.min_tokens,
        priority=request.priority,
        deadline=request.deadline,
        choice=request.choice,
        parent=request.parent,
        adapter=request.adapter,
        prompt_logprobs=request.params.prompt_logprobs is not None,
        pooling=request.params.pooling or "",
        tenant=tenant,
        names=tuple(names),
    )
