"""How much is waiting for the engine, when to say no, and when to come back: a fold over requests and events."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from headway.core.errors import BadInput
from headway.core.events import Admitted, AnyEvent
from headway.engine.messages import Submit
from headway.serve.errors import ApiError

MAX_RETRY_AFTER = 120  # seconds; more than that SDKs do not wait
_WINDOW = 64  # admissions the measured rate looks back over


class Backlog:
    """Requests that were sent to the engine and have not got their first blocks.

    Args:
        max_requests, max_tokens: bounds on their number and on their prompt tokens.

    Attributes:
        tokens: prompt tokens of all of them.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.tokens = 0
        self._waiting: dict[str, tuple[int, int]] = {}  # id -> requests (choices), prompt tokens
        self._requests = 0
        self._admitted: deque[tuple[float, int, int]] = deque(maxlen=_WINDOW)  # seconds, requests, tokens

    def __len__(self) -> int:
        return self._requests

    def check(self, submits: Sequence[Submit], now: float) -> None:
        """Make sure there is room for all of `submits`.

        Raises:
            BadInput: they would not fit into an empty queue either.
            ApiError: 503 with the seconds after which there should be room.
        """
        requests = sum(submit.params.n for submit in submits)
        tokens = sum(len(submit.tokens) for submit in submits)
        if requests > self.max_requests:
            raise BadInput("n", f"{requests} generations in one request; the queue holds {self.max_requests}")
        if tokens > self.max_tokens:
            raise BadInput("prompt", f"{tokens} prompt tokens in one request; the queue holds {self.max_tokens}")
        over_requests = self._requests + requests - self.max_requests
        over_tokens = self.tokens + tokens - self.max_tokens
        if over_requests > 0 or over_tokens > 0:
            wait = self.seconds_until_less(over_requests, over_tokens, now)
            problem = f"{self._requests} requests with {self.tokens} prompt tokens are waiting; try again in {wait} s"
            raise ApiError(503, problem, code="queue_full", retry_after=wait)

    def seconds_until_less(self, requests: int, tokens: int, now: float) -> int:
        """Whole seconds until so much of the queue is gone, at the rate of the last admissions; at least 1."""
        if not self._admitted:
            return 1
        span = max(now - self._admitted[0][0], 1e-3)
        rate_requests = sum(entry[1] for entry in self._admitted) / span
        rate_tokens = sum(entry[2] for entry in self._admitted) / span
        wait = max(requests / rate_requests, tokens / rate_tokens, 1.0)
        return min(math.ceil(wait), MAX_RETRY_AFTER)

    def add(self, submit: Submit) -> None:
        self._waiting[submit.id] = (submit.params.n, len(submit.tokens))
        self._requests += submit.params.n
        self.tokens += len(submit.tokens)

    def gone(self, id: str) -> None:
        """Request `id` waits no longer: refused, cancelled, or done. Idempotent."""
        requests, tokens = self._waiting.pop(id, (0, 0))
        self._requests -= requests
        self.tokens -= tokens

    def fold(self, event: AnyEvent, now: float) -> None:
        if isinstance(event, Admitted) and event.id in self._waiting:
            requests, tokens = self._waiting[event.id]
            self._admitted.append((now, requests, tokens))
            self.gone(event.id)
