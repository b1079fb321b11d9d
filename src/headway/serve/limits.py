"""Caps on what a client may send, applied before anything of that size is built in memory.

connection: count, headers and their bytes, time to send them, time to take an answer   (`protocol`, `http1`)
request:    body bytes, time to send it                                                (`BodyBudget`)
JSON:       nesting, number of elements, digits of a number                            (`check_json`)
"""

from __future__ import annotations

import asyncio
import re
import resource
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from headway.serve.auth import Headers, header
from headway.serve.errors import ApiError

MAX_CONNECTIONS = 4096
BODY_SECONDS = 120.0
GRACE_SECONDS = 10.0  # without a byte of a body
SLOWEST = 64 << 10  # bytes a second, after that
FREE_BYTES = 64 << 10
MAX_DEPTH = 32
MAX_ELEMENTS = 2_000_000
MAX_BRACKETS = 200_000
MAX_DIGITS = 64

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)  # unclosed: to the end, so one pass
_DIGITS_TO_0 = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * (MAX_DIGITS + 1)
_NOT_BRACKETS = bytes(sorted(set(range(256)) - set(b"[]{}")))


def raise_file_limit() -> None:
    """Allow as many open connections as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, 2 * MAX_CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class BodyBudget:
    """Reads bodies, bounding each one, what all requests hold together between their first byte and their answer, what
    those of one peer hold of it, and how slowly they may come.

    Args:
        most: bytes of one body.
        together: bytes of all, without the first `FREE_BYTES` of each: small requests always find room.
        seconds: a body must arrive within.
    """

    def __init__(self, most: int = 8 << 20, together: int = 256 << 20, seconds: float = BODY_SECONDS) -> None:
        self._most = most
        self._together = max(together, most)
        self._seconds = seconds
        self._held = 0
        self._by_peer: Counter[str] = Counter()

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body of a JSON request.

        Raises:
            ApiError: 413 (too large; known from content-length before a byte is read where there is one), 415 (not
                JSON, or compressed), 408 (too slow), 503 (other bodies take all the room).
            ClientDisconnect: the client left before it was complete.
        """
        headers = request.scope["headers"]
        _check_type(headers)
        declared = header(headers, b"content-length")
        if declared is not None and int(declared) > self._most:
            raise self._too_large()
        peer = request.client.host if request.client else ""
        body = bytearray()
        charged = 0
        begin = asyncio.get_running_loop().time()
        try:
            while True:
                late = begin + min(self._seconds, GRACE_SECONDS + len(body) / SLOWEST)
                piece, more = await self._receive(request, late)
                if len(body) + len(piece) > self._most:
                    raise self._too_large()
                body += piece
                charge = max(0, len(body) - FREE_BYTES) - charged
                self._charge(peer, charge)
                charged += charge
                if not more:
                    break
            yield bytes(body)
        finally:
            self._held -= charged
            self._by_peer[peer] -= charged
            if not self._by_peer[peer]:
                del self._by_peer[peer]

    async def _receive(self, request: Request, late: float) -> tuple[bytes, bool]:
        """The next piece, and whether more follow."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(late, loop.time() + GRACE_SECONDS)):
                message = await request.receive()
        except TimeoutError:
            problem = f"the body did not arrive within {self._seconds:g} s, or came too slowly"
            raise ApiError(408, problem, code="body_timeout", headers={"connection": "close"}) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        return message.get("body", b""), bool(message.get("more_body"))

    def _charge(self, peer: str, size: int) -> None:
        share = max(self._together // 2, self._most)
        if self._held + size > self._together or self._by_peer[peer] + size > share:
            raise ApiError(503, "too many large requests at once; try again", code="overloaded")
        self._held += size
        self._by_peer[peer] += size

    def _too_large(self) -> ApiError:
        problem = f"the body is larger than {self._most} bytes"
        return ApiError(413, problem, code="body_too_large")


def _check_type(headers: Headers) -> None:
    """JSON, unnamed or called what curl calls everything that it is given with -d. A page of another site may send just
    that without being asked for leave; but browsers then say whose page it is, so that is refused."""
    kind = (header(headers, b"content-type") or b"application/json").partition(b";")[0].strip().lower()
    form = kind == b"application/x-www-form-urlencoded" and header(headers, b"origin") is None
    if kind != b"application/json" and not form:
        raise ApiError(415, "send content-type: application/json", param="content-type", code="unsupported_media_type")
    coding = (header(headers, b"content-encoding") or b"identity").strip().lower()
    if coding != b"identity":
        raise ApiError(415, "compressed bodies are not accepted", param="content-encoding", code="unsupported_encoding")


def check_json(body: bytes) -> None:
    """Refuse JSON whose decoding would cost more than its size suggests.

    Counting bytes anywhere gives upper bounds for almost every body at once (1 ms per MB, and nobody else runs
    meanwhile); only where those are too high are the strings cut out to count exactly.

    Raises:
        ApiError: 400.
    """
    deep = body.count(b"[") + body.count(b"{") > MAX_DEPTH
    if not deep and body.count(b",") <= MAX_ELEMENTS and _LONG_NUMBER not in body.translate(_DIGITS_TO_0):
        return
    bones = _STRING.sub(b"", body)
    if bones.count(b",") > MAX_ELEMENTS:
        raise ApiError(400, f"the body holds more than {MAX_ELEMENTS} elements", code="too_many_elements")
    if _LONG_NUMBER in bones.translate(_DIGITS_TO_0):
        raise ApiError(400, f"the body holds a number of more than {MAX_DIGITS} digits", code="number_too_long")
    _check_depth(bones.translate(None, _NOT_BRACKETS))


def _check_depth(brackets: bytes) -> None:
    if len(brackets) > MAX_BRACKETS:
        raise ApiError(400, f"the body holds more than {MAX_BRACKETS // 2} lists and objects", code="too_many_elements")
    depth = 0
    for byte in brackets:
        depth += 1 if byte in b"[{" else -1
        if depth > MAX_DEPTH:
            raise ApiError(400, f"the body nests deeper than {MAX_DEPTH}", code="too_deep")
