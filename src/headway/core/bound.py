"""The bound on what waits: one notion, for the scheduler's queue and for the server in front of it."""

from __future__ import annotations

import msgspec


class QueueBound(msgspec.Struct, frozen=True, kw_only=True):
    """Most requests that may wait for their first blocks, each of n choices counted, and most prompt tokens of theirs;
    None = no bound."""

    requests: int | None = None
    tokens: int | None = None

    def full(self, requests: int, tokens: int, more: int, more_tokens: int) -> str:
        """Why there is no room for `more` requests with `more_tokens` beside what waits; "" = there is.

        A prompt that is longer than the bound may wait alone.
        """
        if self.requests is not None and requests + more > self.requests:
            return f"{requests} requests wait already, of at most {self.requests}"
        if self.tokens is not None and tokens and tokens + more_tokens > self.tokens:
            return f"{tokens} prompt tokens wait already, of at most {self.tokens}"
        return ""
