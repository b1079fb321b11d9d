"""How much is waiting for the engine, when to say no, and when to come back: a fold over requests and events."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.core.bound import QueueBound
from headway.core.errors import BadInput
from headway.core.events import Admitted, AnyEvent, Finished
from headway.engine.messages import Submit
from headway.serve.errors import ApiError

MAX_RETRY_AFTER = 3600  # seconds
MEMORY = 30.0  # seconds of work over which the measured rate forgets


class Backlog:
    """Requests that were sent to the engine and have not got their first blocks.

    What is served is measured while there is work: requests and prompt tokens that ended, and how long that took.

    Args:
        bound: on their number and on their prompt tokens, those of each choice counted.

    Attributes:
        tokens: prompt tokens of all of them.
    """

    def __init__(self, bound: QueueBound) -> None:
        self.bound = bound
        self.tokens = 0
        self._waiting: dict[str, tuple[int, int]] = {}  # id -> requests (choices), prompt tokens
        self._requests = 0
        self._running: dict[str, int] = {}  # choice -> prompt tokens, of the first one of a request
        self._now = 0.0
        self._seconds = self._served_requests = self._served_tokens = 0.0  # of the last `MEMORY` seconds of work

    def __len__(self) -> int:
        return self._requests

    def check(self, submits: Sequence[Submit], now: float) -> None:
        """Make sure there is room for all of `submits`.

        Raises:
            BadInput: they would not fit into an empty queue either.
            ApiError: 503 with the seconds after which what waits now should be served.
        """
        self._pass(now)
        requests = sum(submit.params.n for submit in submits)
        tokens = sum(map(_tokens, submits))
        if self.bound.requests is not None and requests > self.bound.requests:
            raise BadInput("n", f"{requests} generations in one request; the queue holds {self.bound.requests}")
        if self.bound.tokens is not None and tokens > self.bound.tokens:
            raise BadInput("prompt", f"{tokens} prompt tokens in one request; the queue holds {self.bound.tokens}")
        if problem := self.bound.full(self._requests, self.tokens, requests, tokens):
            wait = self.retry_after()
            raise ApiError(503, f"{problem}; try again in {wait} s", code="queue_full", retry_after=wait)

    def seconds_left(self) -> float:
        """How long what waits now will take. Before anything was served, at least as many turns of what runs as fit."""
        if self._served_requests < 0.5:
            return self._seconds * self._requests / max(len(self._running), 1)
        by_requests = self._requests * self._seconds / self._served_requests
        by_tokens = self.tokens * self._seconds / self._served_tokens if self._served_tokens else 0.0
        return max(by_requests, by_tokens)

    def retry_after(self) -> int:
        """`seconds_left` in whole seconds; at least 1."""
        return min(max(1, math.ceil(self.seconds_left())), MAX_RETRY_AFTER)

    def add(self, submit: Submit, now: float) -> None:
        self._pass(now)
        self._waiting[submit.id] = (submit.params.n, _tokens(submit))
        self._requests += submit.params.n
        self.tokens += _tokens(submit)

    def gone(self, id: str) -> None:
        """Request `id` waits no longer: refused, cancelled, or done. Idempotent."""
        requests, tokens = self._waiting.pop(id, (0, 0))
        self._requests -= requests
        self.tokens -= tokens

    def fold(self, event: AnyEvent, now: float) -> None:
        if isinstance(event, Admitted):
            self._pass(now)
            self._running.setdefault(event.id, self._waiting.get(event.id, (0, 0))[1])
            self.gone(event.id)
        elif isinstance(event, Finished) and event.id in self._running:
            self._pass(now)
            self._served_requests += 1
            self._served_tokens += self._running.pop(event.id)

    def _pass(self, now: float) -> None:
        """Time goes by; it counts while there is work."""
        elapsed = max(0.0, now - self._now)
        self._now = now
        if self._running or self._waiting:
            keep = math.exp(-elapsed / MEMORY)
            self._seconds = self._seconds * keep + elapsed
            self._served_requests *= keep
            self._served_tokens *= keep


def _tokens(submit: Submit) -> int:
    """Prompt tokens of all its choices."""
    return submit.params.n * len(submit.tokens)
