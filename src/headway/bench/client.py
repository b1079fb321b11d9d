"""The client: sends one request, times every chunk of the answer, and names what went wrong if it did.

    Connections --Connection--> Exchange --bytes, at--> EventParser --data--> ClientDialect --chunks--> RequestRecord

One watchdog looks at all requests in flight, so no request carries a timer of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from headway.bench.dialects import DIALECTS, ClientDialect, Prompt, dialect_named, error_message, shown
from headway.bench.transport import Address, Connections, Exchange, ExchangeFailed
from headway.client.sse import EventParser, EventTooLong
from headway.core.errors import BadInput
from headway.metrics.records import NS_PER_S, Failure, FailureKind, Kind, RequestRecord

WATCH_INTERVAL = 0.05  # seconds between two looks of the watchdog
TEMPLATE_TOKENS = 4096  # most that a chat template and a built-in system prompt may add to a prompt


@dataclass(frozen=True)
class Timeouts:
    """When to stop waiting, in seconds.

    Attributes:
        connect: for a connection.
        stall: silence of one request while the endpoint sends nothing to any other either: it hangs. (A queued request
            is silent too, but then the others are served.)
        total: for a whole request, from the moment it was sent.
    """

    connect: float = 10.0
    stall: float = 30.0
    total: float = 120.0

    def __post_init__(self) -> None:
        for name in ("connect", "stall", "total"):
            if not getattr(self, name) > 0:
                raise BadInput(f"--{name}-timeout", f"{getattr(self, name)!r} is not a number of seconds above 0")


@dataclass(frozen=True)
class Endpoint:
    """What is measured.

    Attributes:
        url: its base ("http://host:8000", ".../v1") or the full path of one of the three APIs.
        api: "chat", "completions" or "anthropic".
        model: name to ask for; "" = the first one /v1/models lists.
        key: sent as a bearer token and, for Anthropic, as x-api-key.
        extra: fields merged into every body; null removes one.
        count_chunks: where a stream has no usage, take each event with text for one token.
    """

    url: str
    api: str = "chat"
    model: str = ""
    key: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    count_chunks: bool = False

    @classmethod
    def parse(cls, url: str, api: str | None, model: str = "", key: str = "", extra: str = "") -> Endpoint:
        """From command-line values; the API is read off the URL if its path is one's and `api` is None."""
        Address.of(url)
        path = urlsplit(url).path.rstrip("/")
        told = next((name for name in ("chat", "completions", "anthropic") if path.endswith(DIALECTS[name].path)), None)
        if api is not None and told is not None and api != told:
            raise BadInput("--api", f"{api!r} contradicts the path of --url, which is {told!r}")
        chosen = api or told or "chat"
        dialect_named(chosen)
        if any(not char.isprintable() or not char.isascii() for char in key):
            raise BadInput("the API key", "has characters that no HTTP header may carry")
        try:
            fields = msgspec.json.decode(extra or "{}", type=dict[str, Any])
        except msgspec.DecodeError:
            raise BadInput("--extra", f"{extra!r} is not a JSON object") from None
        return cls(url, chosen, model, key, fields)

    def path(self, suffix: str) -> str:
        """Path of an API route, whichever form the URL has."""
        path = urlsplit(self.url).path.rstrip("/")
        for dialect in DIALECTS.values():
            path = path.removesuffix(dialect.path)
        return (path or "/v1") + suffix

    def root(self, suffix: str) -> str:
        """Path of a route beside the API's version prefix, such as /metrics."""
        return self.path("").removesuffix("/v1") + suffix

    @property
    def headers(self) -> dict[str, str]:
        headers = {"accept": "text/event-stream, application/json", "user-agent": "headway-bench"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        if self.api == "anthropic":
            headers["anthropic-version"] = "2023-06-01"
            if self.key:
                headers["x-api-key"] = self.key
        return headers


class _WholeUsage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Whole(msgspec.Struct):
    """An answer that was not streamed."""

    usage: _WholeUsage = msgspec.field(default_factory=_WholeUsage)


class BenchClient:
    """Sends requests to one endpoint. Use as an async context manager."""

    def __init__(self, endpoint: Endpoint, limits: Timeouts = Timeouts()) -> None:
        self.endpoint = endpoint
        self.limits = limits
        self.model = endpoint.model
        self.dialect: ClientDialect = dialect_named(endpoint.api)
        self.chunks_received = 0
        self._origin = Address.of(endpoint.url)
        self._pool = Connections(self._origin, limits.connect)
        self._live: dict[Exchange, int] = {}  # exchange -> when it started, ns
        self._last_byte = 0  # ns, of any exchange
        self._watchdog: asyncio.Task[None] | None = None
        lines = [f"host: {self._origin.authority}"] + [f"{name}: {value}" for name, value in endpoint.headers.items()]
        self._common = "\r\n".join(lines)

    async def __aenter__(self) -> BenchClient:
        await self._pool.resolve()
        self._watchdog = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watchdog
        self._pool.close()

    @property
    def in_flight(self) -> int:
        return len(self._live)

    def encode(self, prompt: Prompt, max_tokens: int) -> bytes:
        """The bytes of a request, ready to be sent at its time."""
        body = self.dialect.body(prompt, self.model, max_tokens) | self.endpoint.extra
        return self._post(msgspec.json.encode({name: value for name, value in body.items() if value is not None}))

    async def send(self, request: bytes, record: RequestRecord) -> None:
        """Send one encoded request and fill `record`; failures are written into it, never raised."""
        parser, events = EventParser(), 0

        def take(found: list[bytes], at: int) -> None:
            nonlocal events
            for data in found:
                if record.chunks and record.chunks[-1].kind is Kind.DONE:
                    continue
                failure = self.dialect.interpret(data, at, events, record)
                events += 1
                self.chunks_received += 1
                if failure is not None:
                    exchange.fail(failure)
                    return

        def on_body(data: bytes, at: int) -> None:
            try:
                take(parser.feed(data), at)
            except EventTooLong as error:
                exchange.fail(Failure(FailureKind.MALFORMED, str(error)))

        exchange = Exchange(on_body)
        try:
            exchange = await self._exchange(request, exchange, record)
            if exchange.status == 200:
                take(parser.close(), exchange.last_byte)
            record.failure = judge(exchange, record)
            if self.endpoint.count_chunks and record.failure is None and record.output_tokens is None:
                record.output_tokens = len(record.token_events())
        except ExchangeFailed as error:
            record.failure = error.failure
        record.status = exchange.status or None
        record.ended = time.perf_counter_ns()

    async def count_prompt(self, prompt: str) -> int | None:
        """prompt_tokens by an answer that is not streamed: some endpoints report usage only there.

        Raises:
            ExchangeFailed: no complete answer.
        """
        body = (
            self.dialect.body(prompt, self.model, 1) | self.endpoint.extra | {"stream": False, "stream_options": None}
        )
        parts: list[bytes] = []
        exchange = Exchange(lambda data, _: parts.append(data))
        request = self._post(msgspec.json.encode({name: value for name, value in body.items() if value is not None}))
        await self._exchange(request, exchange, None)
        try:
            return msgspec.json.decode(b"".join(parts), type=_Whole).usage.prompt_tokens
        except msgspec.DecodeError:
            return None

    async def get(self, path: str, seconds: float = 5.0) -> tuple[int, bytes]:
        """Status and body of a plain GET.

        Raises:
            ExchangeFailed: no complete answer within `seconds`.
        """
        body: list[bytes] = []
        exchange = Exchange(lambda data, _: body.append(data))
        request = f"GET {path} HTTP/1.1\r\n{self._common}\r\n\r\n".encode()
        late = Failure(FailureKind.HUNG, f"no answer to GET {path} within {seconds:g} s")
        alarm = asyncio.get_running_loop().call_later(seconds, exchange.fail, late)
        try:
            exchange = await self._exchange(request, exchange, None)
        finally:
            alarm.cancel()
        return exchange.status, b"".join(body) or exchange.error_body

    def _post(self, body: bytes) -> bytes:
        head = f"POST {self.endpoint.path(self.dialect.path)} HTTP/1.1\r\n{self._common}\r\n"
        return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    async def _exchange(self, request: bytes, exchange: Exchange, record: RequestRecord | None) -> Exchange:
        """Run an exchange; once more on a new connection if an idle one turns out to have been closed meanwhile."""
        connection, reused = await self._pool.acquire()
        for _ in range(2):
            self._live[exchange] = time.perf_counter_ns()
            connection.start(request, exchange)
            if record is not None:
                record.sent, record.reused = exchange.sent, reused
            try:
                await exchange.over
                self._pool.release(connection)
                return exchange
            except ExchangeFailed as error:
                if not (reused and error.unanswered and error.failure.kind is FailureKind.HALF_CLOSED):
                    raise
            finally:
                del self._live[exchange]
                self._last_byte = max(self._last_byte, exchange.last_byte)
            connection, reused = await self._pool.acquire(fresh=True)
            exchange.over = asyncio.get_running_loop().create_future()
        raise AssertionError("a fresh connection is not reused")

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL)
            now = time.perf_counter_ns()
            for exchange in self._live:
                self._last_byte = max(self._last_byte, exchange.last_byte)
            for exchange, started in list(self._live.items()):
                silent = (now - max(self._last_byte, exchange.last_byte, started)) / NS_PER_S
                if silent > self.limits.stall:
                    exchange.fail(
                        Failure(
                            FailureKind.HUNG, f"the endpoint sent nothing for {self.limits.stall:g} s (--stall-timeout)"
                        )
                    )
                elif (now - started) / NS_PER_S > self.limits.total:
                    kind = FailureKind.SLOW if exchange.last_byte else FailureKind.HUNG
                    how = "the answer was not complete" if exchange.last_byte else "no byte of an answer came"
                    exchange.fail(Failure(kind, f"{how} within {self.limits.total:g} s (--request-timeout)"))


def judge(exchange: Exchange, record: RequestRecord) -> Failure | None:
    """What is wrong with an exchange that HTTP calls complete; None = nothing."""
    if exchange.status != 200:
        detail = error_message(exchange.error_body) or "no body"
        return Failure(FailureKind.HTTP, f"HTTP status {exchange.status}: {detail}")
    content_type = exchange.headers.get(b"content-type", b"")
    if not record.chunks:
        if b"event-stream" not in content_type:
            kind = shown(content_type) or "none"
            return Failure(FailureKind.MALFORMED, f"the answer is not a stream of events (content-type {kind})")
        return Failure(FailureKind.HALF_CLOSED, "the stream ended before its first event")
    if not any(chunk.kind is Kind.DONE for chunk in record.chunks) and record.finish_reason is None:
        return Failure(FailureKind.HALF_CLOSED, "the stream ended without a finish reason and without its end mark")
    events = len(record.token_events())
    if not events and not record.output_tokens:
        return Failure(FailureKind.EMPTY, "the answer holds no token")
    return usage_fault(record, events)


def usage_fault(record: RequestRecord, events: int) -> Failure | None:
    """How the endpoint's token counts contradict the stream or the request; None = they do not.

    An event with text holds at least one token, and no answer may hold more than `max_tokens`; a server that ignores
    max_tokens is believed if the stream itself shows that many events.
    """
    counts = {
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.output_tokens,
        "cached_tokens": record.cached_tokens,
        "reasoning_tokens": record.reasoning_tokens,
    }
    for name, count in counts.items():
        if count is not None and count < 0:
            return Failure(FailureKind.WRONG_USAGE, f"usage says {name} = {count}")
    output = record.output_tokens
    if output is not None and output < events:
        problem = f"usage says {output} output tokens, but {events} events carried text"
    elif output is not None and output > record.max_tokens and output > events:
        limit = f"max_tokens was {record.max_tokens} and {events} events carried text"
        problem = f"usage says {output} output tokens, but {limit}"
    elif record.prompt_tokens == 0:
        problem = "usage says the prompt had 0 tokens"
    elif record.prompt_tokens is not None and record.prompt_tokens > 2 * record.prompt_bytes + TEMPLATE_TOKENS:
        problem = f"usage says {record.prompt_tokens} prompt tokens for {record.prompt_bytes} bytes of prompt"
    elif record.cached_tokens and record.prompt_tokens is not None and record.cached_tokens > record.prompt_tokens:
        problem = f"usage says {record.cached_tokens} of {record.prompt_tokens} prompt tokens were cached"
    elif record.reasoning_tokens and output is not None and record.reasoning_tokens > output:
        problem = f"usage says {record.reasoning_tokens} of {output} output tokens were reasoning"
    else:
        return None
    return Failure(FailureKind.WRONG_USAGE, problem)
