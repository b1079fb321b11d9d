"""One connection: uvicorn's HTTP/1.1 protocol over a strict parser, with limits on what a client may hold."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from headway.serve.dialects import dialect_of
from headway.serve.errors import ApiError
from headway.serve.http1 import BadRequest, RequestParser
from headway.serve.limits import MAX_CONNECTIONS

RESERVED = 64  # connections that only `OPERATIONS` are answered on, so that a full server can still be watched
OPERATIONS = ("/health", "/ready", "/metrics")
MAX_DISCARDED = 64 << 20  # bytes of a body that go on coming after it was refused; a client reads the answer after them
MAX_PIPELINED = 16  # requests a connection may send ahead
HEADER_SECONDS = 20.0  # from the first byte of a request (or from connecting) to the end of its headers
HURRIED_SECONDS = 2.0  # the same, on a reserved connection
PROBE_SECONDS = (
    0.5,
    0.1,
    5.0,
)  # between signs of life to a client that has shut down its sending side; the last repeats
STALL_SECONDS = 60.0  # a client that takes less than `DRAINED` bytes in so long is given up
SWEEP_SECONDS = 5.0
DRAINED = 32 << 10
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

log = logging.getLogger("headway.serve")


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with its gaps closed.

    uvicorn alone bounds neither heads nor trailers nor the time to send them, stops reading while a second (pipelined)
    request waits, so that it would not see the client of the first one go, and takes a client that has shut down its
    sending side for one that has left. Such a client is answered here; whether it is still there is found out by
    sending it something harmless now and then: to one that has left, the second such sign cannot be sent.
    """

    parser: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = RequestParser(self)
        self.keep_alive_bytes = b""  # what may stand between two pieces of the stream in progress
        self._discarded = 0
        self._half_closed = False
        self._deadline: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._stuck: tuple[float, int] | None = None  # since when the write buffer holds about so many bytes
        self._cycles: list[Any] = []

    # Connection

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._hurried = len(self.connections) > MAX_CONNECTIONS - RESERVED
        if len(self.connections) > MAX_CONNECTIONS:
            self._refuse(503, "too many connections")
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        super().connection_lost(exc)
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles.clear()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends nothing more -> whether the connection stays open, for answers that are due."""
        self._half_closed = self.parser.between and self._busy
        if self._half_closed:
            self._probe(0)
        return self._half_closed

    @property
    def _busy(self) -> bool:
        return any(not cycle.response_complete for cycle in self._cycles)

    def _probe(self, number: int) -> None:
        seconds = PROBE_SECONDS[min(number, len(PROBE_SECONDS) - 1)]
        self._probe_timer = self.loop.call_later(seconds, self._send_probe, number)

    def _send_probe(self, number: int) -> None:
        if self.transport.is_closing():
            return
        cycle = next((cycle for cycle in self._cycles if not cycle.response_complete), None)
        if cycle is None:
            self.transport.close()
        elif not cycle.response_started and cycle.scope["http_version"] == "1.1":
            self.transport.write(CONTINUE)
        elif cycle.response_started and cycle.chunked_encoding and self.keep_alive_bytes:
            self.write_piece(self.keep_alive_bytes)
        self._probe(number + 1)

    @property
    def open_stream(self) -> bool:
        """A stream has begun that can take a piece at once."""
        if self.flow.write_paused or self.transport.is_closing():
            return False
        for cycle in self._cycles:
            if not cycle.response_complete:
                return cycle.response_started and bool(cycle.chunked_encoding) and not cycle.disconnected
        return False

    def write_piece(self, data: bytes) -> None:
        """Send a piece of the stream, which is open: what `send` of ASGI does, without its layers."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.keep_alive_bytes = b""
        if (self._half_closed or self._hurried) and not self._busy and not self.transport.is_closing():
            self.transport.close()

    # Requests

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        if (
            self._cycles and not self.parser.between and self.cycle.response_complete
        ):  # refused early, and still sending
            self._discarded += len(data)
            if self._discarded > MAX_DISCARDED:
                self.transport.abort()
                return
        try:
            self.parser.feed_data(data)
        except BadRequest as error:
            self._refuse(error.status, str(error))
        except httptools.HttpParserError:  # of the target
            self._refuse(400, "the target is not a path")
        if not self.parser.between and not self._uploading:
            self._arm()

    @property
    def _uploading(self) -> bool:
        """A body is on its way to somebody who times it."""
        return bool(self._cycles) and self._cycles[-1].more_body and not self._cycles[-1].response_complete

    def on_headers_complete(self) -> None:
        self._discarded = 0
        self._disarm()
        self.scope["headway.connection"] = self  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)
        if len(self._cycles) > MAX_PIPELINED:
            self.transport.abort()
        elif self._hurried and self.scope["path"] not in OPERATIONS:
            self._refuse(503, "too many connections")
        else:
            self.flow.resume_reading()  # uvicorn pauses on a pipelined request, and would miss the client leaving

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        waiting = self._cycles and self._cycles[0] is not self.cycle and not self._cycles[0].response_complete
        if waiting and len(self.cycle.body) > HIGH_WATER_LIMIT:
            self.transport.abort()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._disarm()

    def _refuse(self, status: int, problem: str) -> None:
        """Answer what no handler will see, and close; where answers to earlier requests are due, just close after them:
        another one would be taken for theirs."""
        log.warning("a connection is refused: %s", problem)
        self._disarm()
        self.parser.stop()
        due = [cycle for cycle in self._cycles if not cycle.response_complete and not cycle.more_body]
        for cycle in self._cycles:
            cycle.keep_alive = False
            if cycle.more_body:  # the rest of its body will not come
                cycle.disconnected = True
                cycle.message_event.set()
        if due:
            return
        error = ApiError(status, problem, code="overloaded" if status == 503 else "invalid_http")
        body = msgspec.json.encode(dialect_of("").error(error))
        retry = b"retry-after: %d\r\n" % error.retry_after if error.retry_after else b""
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + retry + head + body)
        self.transport.close()

    # Time

    def sweep(self, now: float) -> None:
        """Give up a client that takes nothing; called every few seconds. What is looked at cannot grow meanwhile: an
        answer that is complete, or one that waits for room."""
        size = self.transport.get_write_buffer_size()
        if not size or not (self.transport.is_closing() or self.flow.write_paused or not self._busy):
            self._stuck = None
        elif self._stuck is None or self._stuck[1] - size >= DRAINED:
            self._stuck = (now, size)
        elif now - self._stuck[0] > STALL_SECONDS:
            log.warning("a client took nothing for %.0f s and is given up", now - self._stuck[0])
            self.transport.abort()

    def _arm(self) -> None:
        if self._deadline is None:
            seconds = HURRIED_SECONDS if self._hurried else HEADER_SECONDS
            self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
