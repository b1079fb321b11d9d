"""Requests passed on to another HTTP/1.1 server, over kept connections: answers piece by piece, no faster than they are
taken. asyncio and httptools only; for proxies, which must tell a failure before the answer from one in its middle."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import cast
from urllib.parse import urlsplit

import httptools

from headway.core.errors import BadInput, HeadwayError

HIGH_WATER = 256 << 10  # bytes of an answer that wait to be taken; more are not read meanwhile
MOST_HEADERS = 128
MOST_HEAD_BYTES = 64 << 10
CONNECT_SECONDS = 5.0
Headers = Sequence[tuple[bytes, bytes]]


class UpstreamError(HeadwayError):
    """The other server cannot be reached, or broke off.

    Attributes:
        began: bytes of an answer had come.
        connected: it took the request.
    """

    status = 502

    def __init__(self, message: str, began: bool = False, connected: bool = True) -> None:
        super().__init__(message)
        self.began, self.connected = began, connected


class UpstreamAnswer(asyncio.Protocol):
    """A connection, and the one answer that is being read from it.

    Attributes:
        status, headers: of the answer; names are in lower case.
    """

    def __init__(self) -> None:
        self.usable = True
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._transport: asyncio.Transport | None = None
        self._begin()

    def _begin(self) -> None:
        self.status, self.headers = 0, []
        self._head_bytes = self._held = 0
        self._pieces: deque[bytes] = deque()
        self._head_done = self._over = self._keep = False
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._parser = httptools.HttpResponseParser(self)

    async def send(self, request: bytes) -> None:
        """Ask -> when the head of the answer has come.

        Raises:
            UpstreamError: it will not.
        """
        self._begin()
        assert self._transport is not None
        self._transport.write(request)
        while not self._head_done:
            self._check()
            await self._wait()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The answer's body as it comes.

        Raises:
            UpstreamError: it broke off.
        """
        while True:
            if self._pieces:
                piece = b"".join(self._pieces)
                self._pieces.clear()
                self._held = 0
                if self.usable and self._transport is not None:
                    self._transport.resume_reading()
                yield piece
            elif self._over:
                return
            else:
                self._check()
                await self._wait()

    @property
    def done(self) -> bool:
        """The answer was read to its end, and the connection can be used again."""
        return self._over and self._keep and self.usable and not self._pieces

    def abort(self, problem: str = "the request was given up") -> None:
        """End it now; whoever reads it is told so."""
        if self._error is None and not self._over:
            self._error = UpstreamError(problem, self._head_done)
        self.usable = False
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._over:
            self.abort()  # bytes that nobody asked for
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.abort("the answer is no HTTP")
        if self._held > HIGH_WATER and self.usable and self._transport is not None:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        names = {name for name, _ in self.headers}
        framed = b"content-length" in names or b"transfer-encoding" in names
        if self._head_done and not framed and error is None:
            self._over = True  # this answer's end is the end of the connection
        if not self._over and self._error is None:
            self._error = UpstreamError("the connection was closed before the answer was complete", self._head_done)
        self._wake()

    # httptools callbacks

    def on_message_begin(self) -> None:
        if self._over:
            self.abort()  # another answer, in the same piece: nobody asked for it

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._over:
            return
        self._head_bytes += len(name) + len(value)
        if len(self.headers) >= MOST_HEADERS or self._head_bytes > MOST_HEAD_BYTES:
            self.abort("the answer's head is too large")
        if self._error is not None:
            return
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._error is not None or self._over:
            return
        self.status = self._parser.get_status_code()
        if self.status >= 200:
            self._keep = self._parser.should_keep_alive()
            self._head_done = True
        else:
            self.headers.clear()

    def on_body(self, body: bytes) -> None:
        if self._over:
            return
        self._pieces.append(body)
        self._held += len(body)

    def on_message_complete(self) -> None:
        if self.status >= 200 and self._error is None:
            self._over = True


class Upstream:
    """Another server: `http://HOST:PORT`, `https://...`, with a path before every route if it has one, or
    `unix:/PATH/OF/SOCKET`.

    Raises:
        BadInput: it is none of these.
    """

    def __init__(self, url: str, field: str = "--replica") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.prefix = b""
        self._idle: list[UpstreamAnswer] = []
        self._path = self._tls = None
        if url.startswith("unix:"):
            self._path, self._authority = self.url.removeprefix("unix:"), b"localhost"
            return
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError as error:
            raise BadInput(field, f"{url!r} is no URL: {error}") from None
        if parts.username is not None:
            raise BadInput(field, f"{parts.hostname!r} is given with a user; keys are read from --api-key-file")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise BadInput(field, f"{url!r} is not http://HOST:PORT, https://HOST:PORT or unix:PATH")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, port or (443 if self._tls else 80)
        self._authority = parts.netloc.rpartition("@")[2].encode()
        self.prefix = parts.path.encode()

    async def ask(self, method: bytes, path: bytes, headers: Headers = (), body: bytes = b"") -> UpstreamAnswer:
        """Send a request -> its answer, once the head of that has come. `release` it when it was read, or to end it.

        Args:
            headers: what else is said; the host and how long the body is are added.

        Raises:
            UpstreamError: there will be no answer.
        """
        lines = [b"%b %b%b HTTP/1.1" % (method, self.prefix, path), b"host: " + self._authority]
        lines += [b"%b: %b" % header for header in headers]
        if body or method == b"POST":
            lines.append(b"content-length: %d" % len(body))
        request = b"\r\n".join([*lines, b"", b""]) + body
        while self._idle:
            kept = self._idle.pop()
            if kept.usable:
                try:
                    return await self._sent(kept, request)
                except UpstreamError as error:  # closed while it was idle: that says nothing about the server
                    if error.began:
                        raise
        return await self._sent(await self._connect(), request)

    async def _sent(self, connection: UpstreamAnswer, request: bytes) -> UpstreamAnswer:
        try:
            await connection.send(request)
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _connect(self) -> UpstreamAnswer:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                if self._path is not None:
                    _, made = await loop.create_unix_connection(UpstreamAnswer, self._path)
                else:
                    _, made = await loop.create_connection(UpstreamAnswer, self._host, self._port, ssl=self._tls)
        except (OSError, TimeoutError) as error:
            why = getattr(error, "strerror", None) or f"no connection within {CONNECT_SECONDS:g} s"
            raise UpstreamError(f"{self.url} cannot be reached: {why}", connected=False) from None
        return made

    def release(self, answer: UpstreamAnswer) -> None:
        """Keep the connection if its answer was read to the end; else close it, which ends the request there."""
        if answer.done:
            self._idle.append(answer)
        else:
            answer.abort()

    async def get(self, path: bytes, headers: Headers = (), most: int = 8 << 20) -> tuple[int, bytes]:
        """Status and body of a GET.

        Raises:
            UpstreamError: no answer, or one larger than `most` bytes.
        """
        answer = await self.ask(b"GET", path, headers)
        try:
            body = bytearray()
            async for piece in answer.pieces():
                body += piece
                if len(body) > most:
                    raise UpstreamError(f"{self.url} answers more than {most} bytes", began=True)
            return answer.status, bytes(body)
        finally:
            self.release(answer)

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()
        self._idle.clear()
