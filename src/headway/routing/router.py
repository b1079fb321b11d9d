"""The router: requests come, wait while every replica is full, go to one, and are tried again elsewhere if it fails
them before the first token.

              offer            dispatch              begin             end
    (caller) ------> WAITING ----------> AT A REPLICA -----> STREAMING -----> (gone)
                        ^                     |                  |
                        '------- fail --------'                  '-- fail: its client hears of it
                     (never twice at the same replica)

No clock, no sockets: `now` is an argument, in picoseconds, and whoever drives it does what `dispatch` says. The HTTP
proxy and the simulator drive the same one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headway.core.clock import to_ps
from headway.core.errors import BadInput, Reject, Rejected
from headway.routing.index import USUAL_BLOCKS, BlockIndex
from headway.routing.policies.policy import RoutingPolicy
from headway.routing.replica import PrefillSeconds, ReplicaState
from headway.routing.request import RoutedRequest

MOST_WAITING = 4096  # requests at the router
MOST_TRIES = 3  # of a request, each at another replica
REGAIN = 0.02  # of an idle replica's distance from the usual pace, per heartbeat
HEARTBEAT = to_ps(5.0)  # a replica that was not heard of for so long is dead


class Placement(NamedTuple):
    """A request goes to a replica."""

    request: RoutedRequest
    replica: ReplicaState


class RequestRouter:
    """Replicas, what is known of them, and the requests that wait.

    Args:
        policy: who is chosen among those with room.
        most_waiting: requests that may wait here; more are refused.
        heartbeat: ps without a word after which a replica counts as dead; None = never.

    Attributes:
        replicas: by name, in the order in which they joined.
        live: every request that waits or is at a replica, by id.
        awaited: a replica will come even if none is up, and requests wait for it.
        index: which blocks are known where.
    """

    def __init__(
        self, policy: RoutingPolicy, *, most_waiting: int = MOST_WAITING, heartbeat: int | None = HEARTBEAT
    ) -> None:
        self.policy = policy
        self.replicas: dict[str, ReplicaState] = {}
        self.live: dict[str, RoutedRequest] = {}
        self.awaited = False
        self.index = BlockIndex()
        self._waiting: dict[str, RoutedRequest] = {}  # oldest first
        self._most_waiting = most_waiting
        self._heartbeat = heartbeat
        self._numbers = 0
        self._bounded = False  # whether any may be full
        self._open: tuple[ReplicaState, ...] | None = None  # those that take requests; None = to be found anew

    # Replicas

    def join(
        self, name: str, prefill: PrefillSeconds, now: int = 0, *, most: int | None = None, blocks: int = USUAL_BLOCKS
    ) -> ReplicaState:
        """A new replica.

        Args:
            prefill: predicts its seconds to a first token.
            most: requests that it may have at once; None = any number.
            blocks: of its cache.
        """
        if name in self.replicas:
            raise BadInput("replica", f"{name!r} is there already")
        replica = self.replicas[name] = ReplicaState(name, self._numbers, prefill, most)
        replica.seen = now
        self.index.add(self._numbers, blocks)
        self._numbers, self._open = self._numbers + 1, None
        self._bounded |= most is not None
        return replica

    def heard(self, name: str, now: int, others: int | None = None) -> None:
        """A heartbeat. `others`: how many requests the replica says it has beside those sent from here."""
        replica = self.replicas[name]
        if not replica.alive:
            self._open = None
        replica.seen, replica.alive = max(now, replica.seen), True
        if others is not None:
            replica.others = others
        if not replica.load:  # what it was slow by may be over, and nobody would find out
            usual = sum(one.pace for one in self.replicas.values()) / len(self.replicas)
            replica.pace += REGAIN * (usual - replica.pace)

    def check(self, now: int) -> list[str]:
        """Replicas that have fallen silent since the last check; what they had is to be failed by the caller."""
        if self._heartbeat is None:
            return []
        silent = [one for one in self.replicas.values() if one.alive and one.due(self._heartbeat) <= now]
        for replica in silent:
            self.lose(replica.name)
        return [replica.name for replica in silent]

    def lose(self, name: str) -> None:
        """A replica is dead, and what its cache held is gone, until it is heard of again."""
        replica = self.replicas[name]
        replica.alive, replica.others, self._open = False, 0, None
        self.index.clear(replica.number)

    def drain(self, name: str, draining: bool = True) -> None:
        """Send it nothing more; it keeps what it has. Or send to it again.

        Raises:
            BadInput: there is no such replica.
        """
        if name not in self.replicas:
            raise BadInput("replica", f"{name!r} is not one of {', '.join(self.replicas)}")
        self.replicas[name].draining, self._open = draining, None

    def leave(self, name: str) -> None:
        """A replica that has nothing left is gone for good."""
        replica = self.replicas[name]
        assert not replica.requests, "what it has ends before it does"
        self.index.clear(replica.number)
        del self.replicas[name]
        self._open = None

    def drained(self, name: str) -> bool:
        """It takes nothing more and has nothing left."""
        replica = self.replicas[name]
        return replica.draining and not replica.load

    @property
    def open(self) -> tuple[ReplicaState, ...]:
        """Those that take requests, in the order in which they joined."""
        if self._open is None:
            self._open = tuple([replica for replica in self.replicas.values() if replica.open])
        return self._open

    # Requests

    @property
    def waiting(self) -> int:
        """Requests that wait here."""
        return len(self._waiting)

    @property
    def next_deadline(self) -> int | None:
        """When the first of those that wait gives up, ps."""
        return min((r.deadline for r in self._waiting.values() if r.deadline is not None), default=None)

    @property
    def waiting_since(self) -> int | None:
        """When the oldest of those that wait came, ps; None = nobody waits, or nobody said."""
        first = next(iter(self._waiting.values()), None)
        return None if first is None else first.arrival

    def work_seconds(self, now: int) -> float:
        """Predicted seconds of all prompts that have no first token yet, on one replica alone."""
        here = sum(replica.queue_seconds(now) for replica in self.open)
        waiting = (
            sum(self.open[0].prefill_seconds(0, one.tokens) for one in self._waiting.values()) if self.open else 0.0
        )
        return here + waiting

    def offer(self, request: RoutedRequest) -> None:
        """A request comes; `dispatch` says where it goes.

        Raises:
            Rejected: so many wait that it would wait too long, or no replica will take any.
        """
        assert request.id not in self.live, "ids are unique among live requests"
        if len(self._waiting) >= self._most_waiting:
            raise Rejected(Reject.QUEUE_FULL, f"{self._most_waiting} requests wait at the router already", 5.0)
        if not self.awaited and not self.open:
            raise Rejected(Reject.QUEUE_FULL, "no replica is up", 5.0)
        self.live[request.id] = self._waiting[request.id] = request

    def dispatch(self, now: int) -> list[Placement]:
        """Place whom there is room for, the oldest first. One that has failed at all that have room is passed over."""
        placed: list[Placement] = []
        if not self._waiting:
            return placed
        every = tuple(self.replicas.values())
        roomy: Sequence[ReplicaState] = self._roomy()
        for request in list(self._waiting.values()):
            if not roomy:
                break
            able = [replica for replica in roomy if replica.name not in request.tried] if request.tried else roomy
            if able:
                placed.append(self._place(request, able, every, now))
                if not placed[-1].replica.has_room:
                    roomy = self._roomy()
        return placed

    def _roomy(self) -> Sequence[ReplicaState]:
        """Those that have room for a request."""
        return [replica for replica in self.open if replica.has_room] if self._bounded else self.open

    def _place(
        self, request: RoutedRequest, able: Sequence[ReplicaState], every: Sequence[ReplicaState], now: int
    ) -> Placement:
        replica = self.policy.choose(request, able, every, self.index, now)
        cached = 0
        if request.names:
            cached = self.index.runs(request.names, (replica.number,))[replica.number] * request.block_tokens
            self.index.store(replica.number, request.names)
        del self._waiting[request.id]
        request.cached = cached
        replica.take(request, cached, now)
        return Placement(request, replica)

    def begin(self, id: str, now: int) -> None:
        """The first token of a request has gone to its client."""
        request = self.live[id]
        if not request.begun:
            request.begun = True
            self.replicas[request.replica].begin(id, now)

    def end(self, id: str, now: int) -> None:
        """A request is over: answered, cancelled or refused. Idempotent."""
        request = self.live.pop(id, None)
        if request is not None:
            self._waiting.pop(id, None)
            if request.replica:
                self.replicas[request.replica].release(id, now)

    def fail(self, id: str, now: int) -> bool:
        """The replica that has a request has failed it -> whether it waits for another one. If not it is over: its
        client has heard the first token, or there is nobody left to ask."""
        request = self.live[id]
        request.tried = (*request.tried, request.replica)
        self.replicas[request.replica].release(id, now)
        request.replica = ""
        left = self.awaited or any(replica.name not in request.tried for replica in self.open)
        if request.begun or not left or len(request.tried) >= MOST_TRIES:
            del self.live[id]
            return False
        self._waiting = {id: request, **self._waiting}  # it has waited before
        return True

    def expired(self, now: int) -> list[RoutedRequest]:
        """Those that have waited past their deadlines, and those that nobody is left for: they are over."""
        open_names = {replica.name for replica in self.open}
        gone = [
            request
            for request in self._waiting.values()
            if (request.deadline is not None and request.deadline <= now)
            or (not self.awaited and open_names <= set(request.tried))
        ]
        for request in gone:
            self.end(request.id, now)
        return gone

    # What replicas say of their caches

    def stored(self, name: str, names: Sequence[bytes]) -> None:
        """A replica holds these blocks of one sequence now."""
        self.index.store(self.replicas[name].number, names)

    def removed(self, name: str, names: Iterable[bytes]) -> None:
        """A replica has given these up."""
        self.index.remove(self.replicas[name].number, names)
