"""One request on its way through the router: placed, passed on, tried elsewhere as long as its client has no token."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from headway.client.upstream import Headers, UpstreamAnswer, UpstreamError
from headway.engine.messages import TRANSFER_HEADER
from headway.routing.request import RoutedRequest
from headway.serve.dialects import dialect_of
from headway.serve.errors import ApiError
from headway.serve.quotas import Lease
from headway.serve.route.fleet import Help, Member, ReplicaFleet

HOP = frozenset((
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer", b"upgrade",
    b"transfer-encoding", b"content-length", b"host", b"expect", b"accept-encoding",
))  # fmt: skip
OURS = frozenset((b"x-request-id", b"request-id", b"date", b"server"))  # the gate and uvicorn add theirs
OWN = frozenset((b"x-request-id", TRANSFER_HEADER.encode()))  # what a client says of these is not passed on
ELSEWHERE = (502, 503, 504)  # statuses after which another replica is asked
T = TypeVar("T")
log = logging.getLogger("headway.serve")
MOST_ERROR = 1 << 20  # bytes of such an answer


class Passage:
    """An ASGI app that answers one request by a replica's answer.

    Args:
        request: as the router is told of it.
        held: lets the body go; closed as soon as no other replica can be asked.
        lease: what its key uses of its limits; its headers stand in place of the replica's.
    """

    def __init__(
        self, fleet: ReplicaFleet, request: RoutedRequest, method: bytes, path: bytes, headers: Headers, body: bytes,
        held: AsyncExitStack, lease: Lease,
    ) -> None:  # fmt: skip
        self._lease = lease
        self._fleet, self._request, self._held = fleet, request, held
        self._what = method, path, headers, body
        self._stopped: str | None = None
        self._gone = False
        self._pending: asyncio.Future[Any] | None = None  # what `stop` interrupts, but the reading of an answer
        self._answer: UpstreamAnswer | None = None
        self._streams = b""  # media type of the answer whose head was sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await self._pass(send)
        except (ApiError, UpstreamError) as error:
            if self._gone:
                raise ClientDisconnect from None
            await self._failed(error, scope["path"], send)
        finally:
            watcher.cancel()
            self._fleet.end(self._request.id)
            self._lease.close(0)
            await self._held.aclose()

    async def _pass(self, send: Send) -> None:
        again = False
        while True:
            member = await self._interruptible(self._fleet.place(self._request, again))
            member.recall[self._request.id] = self.stop
            help = self._fleet.help(self._request)
            helping = asyncio.create_task(self._help(help)) if help is not None else None
            try:
                if await self._through(member, send, help.pull if help is not None else ""):
                    return
            except UpstreamError as error:
                if self._gone or not self._fleet.fail(self._request.id, member, error.connected):
                    raise
            finally:
                member.recall.pop(self._request.id, None)
                if helping is not None:
                    helping.cancel()  # it has done its part, or is of no use any more: that ends it there, too
                    await asyncio.gather(helping, return_exceptions=True)
            again, self._stopped = True, None

    async def _help(self, help: Help) -> None:
        """Have another replica compute the prompt. Whatever becomes of it: the one that answers can do it, too."""
        begun = False
        method, path, headers, body = self._what
        told = [*headers, (TRANSFER_HEADER.encode(), help.send.encode())]
        try:
            answer = await help.member.upstream.ask(method, path, told, body)
            try:
                begun = answer.status == 200
                async for _ in answer.pieces():
                    pass
            finally:
                help.member.upstream.release(answer)
        except UpstreamError as error:
            log.warning("a prompt is computed where it is answered: %s", error)
        finally:
            self._fleet.helped(self._request.id, begun)

    async def _through(self, member: Member, send: Send, pull: str = "") -> bool:
        """Pass the answer of a replica on -> whether that was it; False: another one is to be asked.

        Raises:
            UpstreamError: it broke off.
        """
        answer = self._answer = await self._interruptible(self._ask(member, pull))
        try:
            pieces = answer.pieces()
            if answer.status in ELSEWHERE:
                body = b"".join([piece async for piece in _bounded(pieces)])
                if self._fleet.fail(self._request.id, member, reached=True):
                    return False
                await self._head(send, answer)
                await send({"type": "http.response.body", "body": body})
                return True
            async for piece in pieces:
                if not self._request.begun and not _is_comment(piece):
                    self._fleet.begin(self._request.id)
                    await self._held.aclose()
                await self._head(send, answer)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await self._head(send, answer)
            await send({"type": "http.response.body"})
            return True
        finally:
            self._answer = None
            member.upstream.release(answer)

    async def _ask(self, member: Member, pull: str) -> UpstreamAnswer:
        method, path, headers, body = self._what
        told = [*headers, (TRANSFER_HEADER.encode(), pull.encode())] if pull else headers
        return await member.upstream.ask(method, path, told, body)

    async def _head(self, send: Send, answer: UpstreamAnswer) -> None:
        """The head of the answer, once. A later replica's is not needed: what was sent before it were comments."""
        if self._streams:
            return
        kind = next((value for name, value in answer.headers if name == b"content-type"), b"")
        self._streams = kind or b"-"
        left_out = HOP | OURS | {name for name, _ in self._lease.headers}
        headers = [(name, value) for name, value in answer.headers if name not in left_out] + self._lease.headers
        length = [(name, value) for name, value in answer.headers if name == b"content-length"]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers + length})

    async def _failed(self, error: ApiError | UpstreamError, path: str, send: Send) -> None:
        """Say so: as a status, or as the last event of a stream. A whole answer that has begun is cut off.

        Raises:
            ApiError, UpstreamError: for the gate to answer, or to close the connection.
        """
        problem = "the replica broke off in the middle of the answer" if self._request.begun else str(error)
        told = error if isinstance(error, ApiError) else ApiError(502, problem, code="replica_failed", retry_after=1)
        if not self._streams:
            raise told
        body = msgspec.json.encode(dialect_of(path).error(told))
        if self._streams.startswith(b"text/event-stream"):
            named = b"event: error\n" if dialect_of(path).id_header else b""
            body = b"\n\n" + named + b"data: " + body + b"\n\n"
        elif b"ndjson" in self._streams:
            body = b"\n" + body + b"\n"
        else:
            raise error
        await send({"type": "http.response.body", "body": body})

    # Interruptions

    def stop(self, why: str) -> None:
        """Give up the replica that has it now."""
        self._stopped = why
        if self._answer is not None:
            self._answer.abort(why)
        elif self._pending is not None:
            self._pending.cancel()

    async def _interruptible(self, work: Coroutine[Any, Any, T]) -> T:
        """What `work` returns, unless it is stopped before."""
        self._pending = task = asyncio.ensure_future(work)
        try:
            return await task
        except asyncio.CancelledError:
            if self._stopped is None:
                raise
            raise UpstreamError(self._stopped) from None
        finally:
            self._pending = None

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self.stop("the client has left")


def forwarded(headers: Headers, id: str) -> list[tuple[bytes, bytes]]:
    """Headers of a request that the replica is to see; keys are among them."""
    kept = [(name, value) for name, value in headers if name not in HOP and name not in OWN]
    return [*kept, (b"x-request-id", id.encode())]


def _is_comment(piece: bytes) -> bool:
    """Of server-sent events, nothing but signs of life."""
    return piece.startswith(b":") and b"data:" not in piece


async def _bounded(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    size = 0
    async for piece in pieces:
        size += len(piece)
        if size > MOST_ERROR:
            raise UpstreamError("the replica's error is too long", began=True)
        yield piece
