"""What a router knows of a replica: what it has in hand, how long that takes, and whether it lives."""

from __future__ import annotations

from collections.abc import Callable

from headway.core.clock import to_seconds
from headway.routing.request import RoutedRequest

PrefillSeconds = Callable[[int, int], float]
"""(tokens found in the cache, tokens of the prompt) -> seconds until the first token on an idle replica."""
FAR = 4.0  # a request counts as at most so many times slower or faster than usual
FORGET = 0.2  # weight of the latest request in how fast a replica is


def per_token(seconds: float) -> PrefillSeconds:
    """Where no step-time model is at hand: a fixed time per token that must be computed."""
    return lambda cached, tokens: (tokens - cached) * seconds


class ReplicaState:
    """One replica, as its router sees it.

    Args:
        number: of the replica in the block index.
        prefill: predicts seconds until the first token.
        most: requests that it may have at once; more wait at the router. None = any number.

    Attributes:
        requests: those that it has, by id.
        draining: it takes no new requests, and keeps those that it has.
        alive: its last heartbeat is fresh.
        seen: when it was last heard of, ps.
        others: requests that it has from elsewhere: sent before this router began, or past it.
        pace: measured over predicted seconds until the first token.
    """

    def __init__(self, name: str, number: int, prefill: PrefillSeconds, most: int | None = None) -> None:
        self.name, self.number, self.most = name, number, most
        self.requests: dict[str, RoutedRequest] = {}
        self.draining = False
        self.alive = True
        self.seen = 0
        self.others = 0
        self.pace = 1.0
        self._prefill = prefill
        self._todo: dict[str, float] = {}  # predicted seconds of requests without a first token, by id, oldest first
        self._sum = 0.0  # of these
        self._since = 0  # when the oldest of them had its turn, ps

    @property
    def load(self) -> int:
        """Requests that it has."""
        return len(self.requests) + self.others

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of requests without a first token."""
        return sum(self.requests[id].tokens for id in self._todo)

    @property
    def open(self) -> bool:
        """Whether it takes requests at all."""
        return self.alive and not self.draining

    @property
    def has_room(self) -> bool:
        return self.open and (self.most is None or self.load < self.most)

    def queue_seconds(self, now: int) -> float:
        """Predicted seconds of work before a newcomer's: prompts that it has, less what is done of the oldest."""
        if not self._todo:
            return 0.0
        oldest = next(iter(self._todo.values()))
        return self.pace * (self._sum - oldest) + max(0.0, self.pace * oldest - to_seconds(now - self._since))

    def prefill_seconds(self, cached: int, tokens: int) -> float:
        """Predicted seconds of a newcomer's own prompt."""
        return self.pace * self._prefill(cached, tokens)

    def take(self, request: RoutedRequest, cached: int, now: int) -> None:
        """A request is sent there. `cached`: tokens of its prompt that are known there."""
        request.replica = self.name
        self.requests[request.id] = request
        if not self._todo:
            self._since = now
        self._todo[request.id] = seconds = self._prefill(cached, request.tokens)
        self._sum += seconds

    def begin(self, id: str, now: int) -> None:
        """The first token of a request has come."""
        seconds = self._todo.get(id)
        if seconds is None:
            return
        if next(iter(self._todo)) == id and seconds > 0:  # it was worked on since `_since`
            took = to_seconds(now - self._since) / seconds
            self.pace += FORGET * (min(FAR * self.pace, max(self.pace / FAR, took)) - self.pace)
        self._leave_queue(id, now)

    def release(self, id: str, now: int) -> None:
        """A request has ended there, or failed. Idempotent."""
        self.requests.pop(id, None)
        self._leave_queue(id, now)

    def _leave_queue(self, id: str, now: int) -> None:
        if id in self._todo:
            self._sum -= self._todo.pop(id)
            self._since = now
        if not self._todo:
            self._sum = 0.0  # no rounding is carried along

    def due(self, timeout: int) -> int:
        """When it counts as dead if nothing is heard of it, ps."""
        return self.seen + timeout
