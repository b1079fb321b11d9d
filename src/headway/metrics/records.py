"""What one request leaves behind: typed chunks with their times, and everything that is derived from them.

Nothing is measured twice and nothing is averaged on the way: a `RequestRecord` holds raw times (integer nanoseconds of
one monotonic clock) and the endpoint's own token counts. Every metric, ours or another tool's, is a function of it.
"""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise

import msgspec

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


class Kind(StrEnum):
    """What a streamed chunk carried."""

    ROLE = "role"  # a delta without a token: the assistant's role, an empty text
    REASONING = "reasoning"
    CONTENT = "content"
    TOOL = "tool"
    FINISH = "finish"  # a finish reason without a token
    USAGE = "usage"
    DONE = "done"

    __hash__ = str.__hash__  # an Enum's own is a Python call, and every chunk of a run is looked up


TOKEN_KINDS = frozenset({Kind.REASONING, Kind.CONTENT, Kind.TOOL})
ANSWER_KINDS = frozenset({Kind.CONTENT, Kind.TOOL})


class FailureKind(StrEnum):
    """Why a request did not end well."""

    CONNECT = "connect"  # no connection
    HUNG = "hung"  # silence: not one byte for the stall limit
    SLOW = "slow"  # bytes still came, but not the end before the time limit
    HTTP = "http_error"  # a status that is not 200
    ERROR_EVENT = "error_event"  # an error inside the stream
    HALF_CLOSED = "half_closed"  # the connection ended before the answer did
    MALFORMED = "malformed"  # not HTTP, not server-sent events, or not the API's JSON
    EMPTY = "empty"  # a complete answer without a single token
    WRONG_USAGE = "wrong_usage"  # token counts that contradict the stream or the request
    NOT_SENT = "not_sent"  # the run was stopped before its turn


class Failure(msgspec.Struct, frozen=True):
    kind: FailureKind
    message: str


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """One piece of a streamed answer.

    Attributes:
        at: arrival, ns.
        kind: what it carries.
        event: number of the server-sent event it came in; an event with reasoning and content makes two chunks.
        tokens: tokens in it, where the endpoint reports usage on every chunk; 0 = not told.
    """

    at: int
    kind: Kind
    event: int
    tokens: int = 0


class TokenTimes:
    """When the tokens of an answer came.

    Args:
        events: (arrival ns, tokens told or 0) of each event that carried tokens.
        tokens: of the whole answer, if that count is trusted.
    """

    __slots__ = ("_events", "_tokens", "chunk_gaps_ms")

    def __init__(self, events: list[tuple[int, int]], tokens: int | None) -> None:
        self._events, self._tokens = events, tokens
        times = [at for at, _ in events]
        self.chunk_gaps_ms = [(late - early) / NS_PER_MS for early, late in pairwise(times)]  # between events

    @property
    def tpot_ms(self) -> float | None:
        """(last token - first token) / tokens after the first chunk; undefined without any, or for an untrusted count.
        The first chunk is taken to hold one token where the endpoint does not tell."""
        if not self._events or self._tokens is None:
            return None
        (first, tokens), (last, _) = self._events[0], self._events[-1]
        after = self._tokens - max(tokens, 1)
        return (last - first) / after / NS_PER_MS if after > 0 else None

    def token_gaps_ms(self) -> list[tuple[float, int]]:
        """Gaps per token, and for how many tokens each: those of a chunk share its gap.

        Where the endpoint does not tell tokens per chunk, the first event is taken to hold one and the rest of the
        answer is spread evenly over the others. Empty if the count is not trusted.
        """
        if self._tokens is None or not self.chunk_gaps_ms:
            return []
        counts = [tokens for _, tokens in self._events[1:]]
        if not all(counts):
            counts = spread(self._tokens - 1, len(counts))
        return [(gap / count, count) for gap, count in zip(self.chunk_gaps_ms, counts, strict=True) if count]


class RequestRecord(msgspec.Struct, kw_only=True, gc=False):
    """One request of a run. Times are ns of one monotonic clock; 0 = did not happen.

    Attributes:
        intended: when the load said it should start. All latencies count from here, so a late client cannot hide.
        sent: when its bytes were handed to the operating system.
        ended: when it was over, well or not.
        prompt_bytes: UTF-8 bytes of the prompt.
        prompt_wanted: prompt tokens the workload asked for; 0 = no target.
        max_tokens: limit that was sent.
        prompt_tokens, output_tokens, reasoning_tokens, cached_tokens: the endpoint's usage; None = not told.
        reused: it travelled on a connection that was already open.
        server_id: the endpoint's id of the answer.
        warmup: excluded from every metric.
        text: pieces of the answer, kept where a tokenizer is to count them; None = not kept.
    """

    index: int
    intended: int
    max_tokens: int
    prompt_bytes: int = 0
    prompt_wanted: int = 0
    sent: int = 0
    ended: int = 0
    chunks: list[Chunk] = []
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    server_id: str | None = None
    status: int | None = None
    reused: bool = False
    warmup: bool = False
    failure: Failure | None = None
    text: list[str] | None = None

    @property
    def completed(self) -> bool:
        return self.failure is None and self.ended > 0

    @property
    def usage_trusted(self) -> bool:
        """The endpoint's output count exists and does not contradict the stream."""
        wrong = self.failure is not None and self.failure.kind is FailureKind.WRONG_USAGE
        return self.output_tokens is not None and not wrong

    def first(self, kinds: frozenset[Kind]) -> int | None:
        """Arrival of the first chunk of these kinds, ns."""
        for chunk in self.chunks:
            if chunk.kind in kinds:
                return chunk.at
        return None

    def last(self, kinds: frozenset[Kind]) -> int | None:
        """Arrival of the last chunk of these kinds, ns."""
        for chunk in reversed(self.chunks):
            if chunk.kind in kinds:
                return chunk.at
        return None

    def token_events(self) -> list[tuple[int, int]]:
        """(arrival ns, tokens told or 0) of each event that carried tokens."""
        events: dict[int, tuple[int, int]] = {}
        for chunk in self.chunks:
            if chunk.kind in TOKEN_KINDS:
                event = chunk.event
                if event in events:
                    at, tokens = events[event]
                    events[event] = (at, tokens + chunk.tokens)
                else:
                    events[event] = (chunk.at, chunk.tokens)
        return list(events.values())

    def pace(self) -> TokenTimes:
        """The times of its tokens; to read several things off them."""
        return TokenTimes(self.token_events(), self.output_tokens if self.usage_trusted else None)

    @property
    def ttft_ms(self) -> float | None:
        """First token of any kind, since the intended start: queueing on either side included."""
        return self._since_intended(self.first(TOKEN_KINDS))

    @property
    def ttfa_ms(self) -> float | None:
        """First token of the answer: reasoning does not count."""
        return self._since_intended(self.first(ANSWER_KINDS))

    @property
    def e2e_ms(self) -> float | None:
        """Last token; equals ttft + (tokens after the first chunk) * tpot."""
        return self._since_intended(self.last(TOKEN_KINDS))

    @property
    def e2e_done_ms(self) -> float | None:
        """End of the stream: [DONE] or message_stop."""
        return self._since_intended(self.last(frozenset({Kind.DONE})))

    @property
    def tpot_ms(self) -> float | None:
        return self.pace().tpot_ms

    def chunk_gaps_ms(self) -> list[float]:
        return self.pace().chunk_gaps_ms

    def token_gaps_ms(self) -> list[tuple[float, int]]:
        return self.pace().token_gaps_ms()

    def _since_intended(self, at: int | None) -> float | None:
        return None if at is None else (at - self.intended) / NS_PER_MS


def spread(total: int, parts: int) -> list[int]:
    """`total` as `parts` integers as equal as possible, the larger ones evenly placed."""
    return [total * (part + 1) // parts - total * part // parts for part in range(parts)]
