"""One generating HTTP request from its tokenised query to its last byte, streaming or not.

Answer -> EngineLink.open -> Inbox -> deltas -> bytes
                   ^-- a client that leaves, or an error, closes the inbox: the engine is told at once
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from headway.core.errors import HeadwayError
from headway.engine.messages import Delta, Refusal
from headway.serve.admission import retry_after
from headway.serve.answer import Answer
from headway.serve.choice import Choice, Gain
from headway.serve.dialects import dialect_of
from headway.serve.errors import ApiError, from_headway
from headway.serve.link import EngineLink, Inbox
from headway.serve.quotas import Lease
from headway.serve.text_pool import TextPool

HEAD_SECONDS = 2.0  # a stream's headers wait so long for the first output, so that a refusal still has its own status
KEEP_ALIVE_SECONDS = 15.0  # a silent stream says so, which keeps proxies from cutting it
PIECE_BYTES = 256 << 10  # answers below it are built on the event loop, and sent at once
PULSE_SECONDS = 5.0  # how often silence is looked for

T = TypeVar("T")


class Generation:
    """An ASGI response: has an answer made, and sends it. Whatever ends it, the engine keeps nothing of it.

    While one piece of a stream waits for a slow client, the deltas of further turns gather in the inbox and go out as
    one piece: at most one answer is held.
    """

    def __init__(
        self,
        link: EngineLink,
        pool: TextPool,
        answer: Answer,
        lease: Lease,
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        self._link = link
        self._pool = pool
        self._answer = answer
        self._lease = lease
        self._headers = headers  # more of the answer
        self._failure: BaseException | None = None
        self._format = answer.query.format(answer)
        self._inbox = Inbox(answer.submits)
        self._connection: Any = None  # that takes pieces without ASGI's layers; None = there is none
        self._sent = 0.0  # loop time at which the last piece had been taken

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._sent = asyncio.get_running_loop().time()
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await asyncio.sleep(0)  # the watcher looks first: whoever left during tokenising costs the engine nothing
            if self._inbox.client_gone:
                raise ClientDisconnect
            self._link.open(self._inbox)
            if not self._answer.query.stream:
                await self._whole(send)
                return
            connection = scope.get("headway.connection")
            if connection is not None:
                connection.keep_alive_bytes = self._format.keep_alive
            self._connection = connection
            await self._stream(send, dialect_of(scope.get("path", "")).names)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._lease.close(self._answer.completion_tokens)
            self._link.close(self._inbox)
            watcher.cancel()
            if self._answer.ended is not None:
                self._answer.ended(self._failure)

    async def _watch(self, receive: Receive) -> None:
        """Notice a client that leaves (nobody else reads: it would pass unseen), and keep silence alive. One timer per
        request and pulse, instead of one per piece."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout(PULSE_SECONDS):
                    if (await receive())["type"] == "http.disconnect":
                        break
            except TimeoutError:
                if loop.time() - self._sent > KEEP_ALIVE_SECONDS:
                    self._inbox.wake()
        self._inbox.client_gone = True
        self._inbox.wake()

    async def _take(self) -> Sequence[tuple[Choice, Gain]]:
        outputs = await self._inbox.take()
        if self._inbox.client_gone:
            raise ClientDisconnect
        try:
            return self._count(outputs)
        except ApiError as error:
            if error.code in ("queue_timeout", "deadline_exceeded"):
                error.retry_after = retry_after(self._link.status.wait)
            raise

    def _count(self, outputs: Sequence[Delta | Refusal]) -> Sequence[tuple[Choice, Gain]]:
        self._answer.admitted = self._inbox.admitted
        return self._answer.take(outputs)

    def _sink(self, outputs: Sequence[Delta | Refusal]) -> bool:
        """Send a step's outputs while the task of this request sleeps; False = the client does not keep up."""
        if not self._connection.open_stream:
            return False
        data = self._joined(self._count(outputs))
        if data:
            self._connection.write_piece(data)
            self._sent = asyncio.get_running_loop().time()
        return True

    async def _whole(self, send: Send) -> None:
        while self._inbox.pending or self._inbox.waiting:
            for choice, gain in await self._take():
                choice.add(gain)
        pieces = await self._built(self._format.whole)
        length = sum(map(len, pieces))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(length).encode())]
        headers += [*self._lease.headers, *self._headers]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if length < PIECE_BYTES:
            pieces = [b"".join(pieces)]
        *pieces, last = pieces
        for piece in pieces:
            await self._send(send, piece)
        await self._send(send, last, last=True)

    async def _stream(self, send: Send, names: Mapping[str, str]) -> None:
        gained: Sequence[tuple[Choice, Gain]] = ()
        with suppress(TimeoutError):  # nothing yet: open the stream, and let it be silent
            async with asyncio.timeout(HEAD_SECONDS):
                gained = await self._take()
        data = await self._chunks(gained)
        headers = [
            (b"content-type", self._format.stream_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *self._lease.headers,
            *self._headers,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await self._send(send, data or self._format.keep_alive)
            if self._connection is not None and not self._answer.query.echo:
                self._inbox.sink = self._sink
            while self._inbox.pending or self._inbox.waiting:
                data = await self._chunks(await self._take())
                if data:
                    await self._send(send, data)
                elif asyncio.get_running_loop().time() - self._sent > KEEP_ALIVE_SECONDS:
                    await self._send(send, self._format.keep_alive)
            data = self._format.end()
        except HeadwayError as error:  # too late for a status: the stream's last event says it
            self._failure = from_headway(error, names)
            data = self._format.failed(self._failure)
        await self._send(send, data, last=True)

    async def _chunks(self, gained: Sequence[tuple[Choice, Gain]]) -> bytes:
        if self._answer.query.echo:  # a long prompt's log-probabilities are much to build
            return await self._built(lambda: self._joined(gained))
        return self._joined(gained)

    def _joined(self, gained: Sequence[tuple[Choice, Gain]]) -> bytes:
        if len(gained) == 1:
            return self._format.chunk(*gained[0])
        return b"".join([self._format.chunk(choice, gain) for choice, gain in gained])

    async def _built(self, build: Callable[[], T]) -> T:
        """What `build` makes of the answer so far, made in a thread where it is large."""
        size = self._answer.bytes_to_build
        return build() if size < PIECE_BYTES else await self._pool.run(size, build)

    async def _send(self, send: Send, data: bytes, last: bool = False) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": not last})
        self._sent = asyncio.get_running_loop().time()
