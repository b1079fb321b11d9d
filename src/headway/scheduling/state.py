"""Who is where. Every move of a request between its places is one function here, and blocks move nowhere else:

                 add                admit                 finish
       (caller) -----> WAITING -----------------> RUNNING -------> (gone)
          |               ^ ^------- preempt -------'                ^
          '--> FORKING ---'      cancel, deadline, from anywhere ----'
         (choices 1..n-1 wait there until the prompt of choice 0 is computed)

Only RUNNING rows own blocks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

import msgspec

from headway.cache.kv import Hit, KVCache
from headway.cache.table import BlockTable
from headway.core.events import Admitted, EventLog, Finished, Preempted, Queued
from headway.core.request import Finish, Request
from headway.core.step import BlockCopy
from headway.scheduling.queue import AdmissionQueue
from headway.scheduling.row import STRICT_AFTER, Place, Row


class Output(msgspec.Struct, frozen=True, gc=False):
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
    """All live requests, in their places, and the cache.

    Attributes:
        rows: every live row, by id.
        queue, forking, running: the places. `running` is sorted by `Row.rank`; `forking` lists choices by parent id.
        gone: ids the executor holds and must drop with the next plan.
        outputs: what the engine has not been told yet.
    """

    def __init__(self, cache: KVCache, log: EventLog | None) -> None:
        self.cache = cache
        self.log = log
        self.rows: dict[str, Row] = {}
        self.queue = AdmissionQueue()
        self.forking: dict[str, list[Row]] = {}
        self.running: list[Row] = []
        self.gone: list[str] = []
        self.outputs: list[Output] = []
        self._deadlines: list[tuple[int, int, str]] = []  # (deadline, number, id); stale once the request has ended
        self._added = 0

    def add(self, request: Request) -> None:
        """A new request; choices other than the first wait for their parent's prompt."""
        row = Row(request, BlockTable(self.cache, request.tenant, request.adapter), self._added)
        self._added += 1
        self.rows[request.id] = row
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, row.number, request.id))
        if request.parent is None:
            self.queue.push(row)
        else:
            row.place = Place.FORKING
            self.forking.setdefault(request.parent, []).append(row)
        if self.log:
            self.log.append(_queued(row, self.cache.block_size))

    def admit(self, row: Row, hit: Hit, parent: Row | None, now: int) -> tuple[BlockCopy, ...]:
        """WAITING -> RUNNING, starting from a cached prefix, or from the prompt of `parent` (its full blocks shared,
        the part-filled one copied: returns the copies to make)."""
        request = row.request
        self.queue.remove(row)
        row.table.adopt(hit)
        request.computed = hit.length * self.cache.block_size
        copies: tuple[BlockCopy, ...] = ()
        if parent is not None:
            copies = row.table.copy_partial(parent.table, request.prompt_len - 1)
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

    def preempt(self, row: Row, now: int) -> None:
        """RUNNING -> WAITING: give the blocks back and compute again later, in its old place in the order."""
        request = row.request
        if self.log:
            self.log.append(Preempted(now=now, id=request.id, wasted=request.computed))
        self._stop_running(row, now)
        request.computed = 0
        request.draft = []
        request.preemptions += 1
        row.strict = request.preemptions >= STRICT_AFTER
        row.place = Place.WAITING
        self.queue.push(row)

    def finish(self, row: Row, finish: Finish, now: int) -> None:
        """From anywhere -> gone, giving every block back. Choices that still wait for this one's prompt need wait no
        longer."""
        request = row.request
        request.finish = finish
        if row.place is Place.RUNNING:
            self._stop_running(row, now)
        elif row.place is Place.WAITING:
            self.queue.remove(row)
        else:
            self._leave_forking(row)
        del self.rows[request.id]
        self.release_forks(request.id)
        if self.log:
            full = len(request.tokens) // self.cache.block_size
            self.log.append(
                Finished(
                    now=now,
                    id=request.id,
                    reason=finish.reason,
                    prompt_tokens=request.prompt_len,
                    cached=request.cached,
                    generated=request.generated,
                    lived=now - request.arrival,
                    names=tuple(row.table.name_blocks(request.tokens, full)),
                )
            )

    def abort(self, row: Row, why: str | None, now: int) -> None:
        """Finish for a reason outside of the step, and tell the client."""
        finish = Finish("abort", why)
        self.finish(row, finish, now)
        self.outputs.append(Output(row.request, (), finish))

    def abort_expired(self, now: int) -> None:
        """Abort every request whose deadline has passed. O(1) when none has."""
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            self.abort(self.rows[self._deadlines[0][2]], "deadline exceeded", now)

    def next_deadline(self) -> int | None:
        """The earliest deadline of a live request, ps."""
        while self._deadlines:
            deadline, number, id = self._deadlines[0]
            if id in self.rows and self.rows[id].number == number:
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def forget_held(self) -> None:
        """The executor holds no row any more, so there is none to drop either."""
        self.gone.clear()
        for row in self.running:
            row.held = False

    def release_forks(self, parent: str) -> None:
        """FORKING -> WAITING for the choices that waited for `parent`. Their order puts them before later arrivals."""
        for row in self.forking.pop(parent, ()):
            row.place = Place.WAITING
            self.queue.push(row)

    def _leave_forking(self, row: Row) -> None:
        parent = row.request.parent
        assert parent is not None
        self.forking[parent].remove(row)
        if not self.forking[parent]:
            del self.forking[parent]

    def _stop_running(self, row: Row, now: int) -> None:
        del self.running[bisect_left(self.running, row.rank, key=lambda row: row.rank)]
        row.table.release(now)
        if row.held:
            row.held = False
            self.gone.append(row.request.id)


def _queued(row: Row, block_size: int) -> Queued:
    request = row.request
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
        names=tuple(row.table.name_blocks(request.tokens, request.prompt_len // block_size)),
    )
