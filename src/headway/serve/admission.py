"""How much is waiting for the engine, and when to say no: a fold over requests and events.

How long it will wait is the scheduler's to say: it measures its own speed (`Status.wait`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.core.bound import QueueBound
from headway.core.errors import BadInput
from headway.core.events import Admitted, AnyEvent
from headway.engine.messages import Submit
from headway.serve.errors import ApiError

MAX_RETRY_AFTER = 3600  # seconds


def retry_after(wait: float) -> int:
    """Whole seconds, at least 1."""
    return min(max(1, math.ceil(wait)), MAX_RETRY_AFTER)


class Backlog:
    """Requests that were sent to the engine and have not got their first blocks.

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

    def __len__(self) -> int:
        return self._requests

    def check(self, submits: Sequence[Submit], wait: float) -> None:
        """Make sure there is room for all of `submits`.

        Args:
            wait: seconds after which what waits now should be served.

        Raises:
            BadInput: they would not fit into an empty queue either.
            ApiError: 503.
        """
        requests = sum(submit.params.n for submit in submits)
        tokens = sum(map(_tokens, submits))
        if self.bound.requests is not None and requests > self.bound.requests:
            raise BadInput("n", f"{requests} generations in one request; the queue holds {self.bound.requests}")
        if self.bound.tokens is not None and tokens > self.bound.tokens:
            raise BadInput("prompt", f"{tokens} prompt tokens in one request; the queue holds {self.bound.tokens}")
        if problem := self.bound.full(self._requests, self.tokens, requests, tokens):
            seconds = retry_after(wait)
            raise ApiError(503, f"{problem}; try again in {seconds} s", code="queue_full", retry_after=seconds)

    def add(self, submit: Submit) -> None:
        self._waiting[submit.id] = (submit.params.n, _tokens(submit))
        self._requests += submit.params.n
        self.tokens += _tokens(submit)

    def gone(self, id: str) -> None:
        """Request `id` waits no longer: admitted, refused, cancelled, or done. Idempotent."""
        requests, tokens = self._waiting.pop(id, (0, 0))
        self._requests -= requests
        self.tokens -= tokens

    def fold(self, event: AnyEvent) -> None:
        if isinstance(event, Admitted):
            self.gone(event.id)


def _tokens(submit: Submit) -> int:
    """Prompt tokens of all its choices."""
    return submit.params.n * len(submit.tokens)
