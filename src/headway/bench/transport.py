"""HTTP/1.1 with nothing between the socket and the clock.

General clients cost a few hundred microseconds per request and tens per chunk, on cores that the measured server may be
using. Here a chunk costs one callback: asyncio hands over bytes, their arrival is read from the clock at once,
httptools takes the framing off.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from headway.core.errors import BadInput
from headway.metrics.records import Failure, FailureKind

MAX_ERROR_BODY = 64 * 1024


class ExchangeFailed(Exception):
    """An exchange did not end well. `unanswered`: not one byte of an answer had come."""

    def __init__(self, failure: Failure, unanswered: bool = False) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.unanswered = unanswered


@dataclass(frozen=True)
class Address:
    """Where to connect: from a URL, without its path."""

    host: str
    port: int
    tls: bool

    @classmethod
    def of(cls, url: str) -> Address:
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise BadInput("--url", f"{url!r} is no URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadInput("--url", f"{url!r} is not an http:// or https:// address")
        try:
            port = parts.port
        except ValueError:
            raise BadInput("--url", f"{url!r} has a port that is not a number from 0 to 65535") from None
        return cls(parts.hostname, port or (443 if parts.scheme == "https" else 80), parts.scheme == "https")

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


class Exchange:
    """One request and its answer. `on_body(data, at)` is called for each piece of a 200 answer's body."""

    def __init__(self, on_body: Callable[[bytes, int], None]) -> None:
        self.on_body = on_body
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.error_body = b""
        self.sent = 0
        self.last_byte = 0  # ns; 0 = nothing came yet
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.connection: Connection | None = None

    def fail(self, failure: Failure) -> None:
        """End it now, and its connection with it."""
        if not self.over.done():
            self.over.set_exception(ExchangeFailed(failure, unanswered=self.last_byte == 0))
        if self.connection is not None:
            self.connection.abort()

    def finish(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._exchange: Exchange | None = None
        self._arrival = 0
        self._keep = False
        self.usable = True

    def start(self, request: bytes, exchange: Exchange) -> None:
        assert self._transport is not None
        self._exchange, exchange.connection = exchange, self
        self._parser = httptools.HttpResponseParser(self)
        self._keep = False
        self._transport.write(request)
        exchange.sent = time.perf_counter_ns()

    def abort(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        self._arrival = time.perf_counter_ns()
        exchange = self._exchange
        if exchange is None or self._parser is None:
            self.abort()  # bytes that nobody asked for
            return
        exchange.last_byte = self._arrival
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            exchange.fail(Failure(FailureKind.MALFORMED, "the endpoint tried to switch to another protocol"))
        except httptools.HttpParserError as error:
            exchange.fail(Failure(FailureKind.MALFORMED, f"the answer is not HTTP: {error.__cause__ or error}"))

    def eof_received(self) -> bool:
        return False  # an end of input ends the connection, also when the other side keeps its half open

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        exchange, self._exchange = self._exchange, None
        if exchange is None or exchange.over.done():
            return
        framed = b"content-length" in exchange.headers or b"chunked" in exchange.headers.get(b"transfer-encoding", b"")
        if exchange.status and not framed and error is None:
            exchange.finish()  # this answer's end is the end of the connection
            return
        how = f" ({error})" if error else ""
        exchange.over.set_exception(
            ExchangeFailed(
                Failure(FailureKind.HALF_CLOSED, f"the connection was closed before the answer was complete{how}"),
                unanswered=exchange.last_byte == 0,
            )
        )

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._exchange is not None:
            self._exchange.headers[name.lower()] = value.lower()

    def on_headers_complete(self) -> None:
        if self._exchange is not None and self._parser is not None:
            self._exchange.status = self._parser.get_status_code()
            self._keep = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        exchange = self._exchange
        if exchange is None or exchange.over.done():
            return
        if exchange.status == 200:
            exchange.on_body(body, self._arrival)
        elif len(exchange.error_body) < MAX_ERROR_BODY:
            exchange.error_body += body

    def on_message_complete(self) -> None:
        exchange = self._exchange
        if exchange is None or exchange.status < 200:
            return
        self._exchange = None
        exchange.finish()
        if not self._keep:
            self.abort()


class Connections:
    """Connections to one origin: reuses idle ones, opens as many as are needed, never makes a request wait."""

    def __init__(self, origin: Address, connect_timeout: float) -> None:
        self.origin = origin
        self._timeout = connect_timeout
        self._idle: list[Connection] = []
        self._addresses: list[str] = []
        self._tls = ssl.create_default_context() if origin.tls else None

    async def resolve(self) -> None:
        """Look the host up once, so that no request pays for it.

        Raises:
            BadInput: the name is unknown.
        """
        try:
            found = await asyncio.get_running_loop().getaddrinfo(self.origin.host, self.origin.port, type=1)
        except OSError as error:
            raise BadInput("--url", f"host {self.origin.host!r} is unknown ({error})") from None
        self._addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))

    async def acquire(self, fresh: bool = False) -> tuple[Connection, bool]:
        """A connection, and whether it was open before.

        Raises:
            ExchangeFailed: no address accepts a connection in time.
        """
        while self._idle and not fresh:
            connection = self._idle.pop()
            if connection.usable:
                return connection, True
        reason = "no address"
        for address in list(self._addresses):
            try:
                return await self._connect(address), False
            except TimeoutError:
                reason = f"no connection within {self._timeout:g} s"
            except (OSError, ssl.SSLError) as error:
                reason = error.strerror or str(error)
        raise ExchangeFailed(Failure(FailureKind.CONNECT, f"cannot connect to {self.origin.authority}: {reason}"), True)

    async def _connect(self, address: str) -> Connection:
        name = self.origin.host if self._tls else None
        opening = asyncio.get_running_loop().create_connection(
            Connection, address, self.origin.port, ssl=self._tls, server_hostname=name
        )
        _, connection = await asyncio.wait_for(opening, self._timeout)
        if self._addresses[0] != address:  # this one answers: ask it first from now on
            self._addresses.remove(address)
            self._addresses.insert(0, address)
        return connection

    def release(self, connection: Connection) -> None:
        if connection.usable:
            self._idle.append(connection)

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()
