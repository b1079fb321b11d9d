"""HTTP/1.1 requests, read strictly (RFC 9112) and within limits: what two servers could read in two ways is an error.

Refused: more than one Host or Content-Length, a Content-Length beside Transfer-Encoding, codings other than chunked,
targets that are no path, folded headers, bare line feeds. A wish to upgrade is ignored, as the standard allows: the
request is answered in HTTP/1.1, and its body is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

MAX_HEAD_BYTES = 32 << 10  # request line and headers
MAX_HEADERS = 64
MAX_TRAILER_BYTES = 8 << 10
MAX_CHUNK_LINE = 256  # a chunk's size and extensions
_REQUEST_LINE = re.compile(rb"([A-Z][A-Z-]{0,19}) (/[\x21-\x7e]*|\*) HTTP/1\.([01])")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NO_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,12})[ \t]*(?:;[^\r\n]*)?")
_NOT_FORWARDED = (b"upgrade", b"http2-settings")


class BadRequest(Exception):
    """The bytes are not one request that everybody reads alike; the connection cannot go on."""

    def __init__(self, problem: str, status: int = 400) -> None:
        super().__init__(problem)
        self.status = status


class Receiver(Protocol):
    """Whom the parser tells, in this order: begin, url, headers, headers complete, pieces of body, message complete."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class RequestParser:
    """Cuts bytes, however they arrive, into requests. Takes the place of `httptools.HttpRequestParser`.

    Attributes:
        between: no request has begun whose end has not come.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._buffer = bytearray()  # of the body at most what came at once, of all else at most its limit
        self._step: Callable[[], bool] = self._head
        self._searched = 0  # bytes of the buffer that hold no end of a head
        self._left = 0  # bytes to come of the body, or of the chunk
        self._trailer_bytes = 0
        self._method = b""
        self._version = "1.1"
        self._keep_alive = True

    @property
    def between(self) -> bool:
        return (self._step == self._head and not self._buffer) or self._step == self._ignore

    def get_method(self) -> bytes:
        return self._method

    def get_http_version(self) -> str:
        return self._version

    def should_keep_alive(self) -> bool:
        return self._keep_alive

    def should_upgrade(self) -> bool:
        return False

    def feed_data(self, data: bytes) -> None:
        """
        Raises:
            BadRequest: nothing more can be read from this connection.
        """
        if not self._buffer and len(data) < self._left:  # all of it is body: no copy
            self._left -= len(data)
            self._receiver.on_body(data)
            return
        self._buffer += data
        while self._buffer and self._step():
            pass

    def stop(self) -> None:
        """Take no notice of what still comes."""
        self._step = self._ignore
        self._left = 0
        self._buffer.clear()

    # Steps: each takes something off the buffer, or returns False if it needs more.

    def _head(self) -> bool:
        buffer = self._buffer
        while buffer.startswith(b"\r\n"):  # some clients end a body so
            del buffer[:2]
        end = buffer.find(b"\r\n\r\n", max(0, self._searched - 3))
        if end < 0 or end > MAX_HEAD_BYTES:
            if len(buffer) > MAX_HEAD_BYTES:
                raise BadRequest(f"the request's head is larger than {MAX_HEAD_BYTES} bytes", 431)
            if buffer[:1] and not buffer[:1].isupper() and buffer[:1] != b"\r":
                raise BadRequest("this is not an HTTP request")
            self._searched = len(buffer)
            return False
        line, *lines = bytes(buffer[:end]).split(b"\r\n")
        del buffer[: end + 4]
        self._searched = 0
        self._request(line, lines)
        return True

    def _request(self, line: bytes, lines: list[bytes]) -> None:
        request = _REQUEST_LINE.fullmatch(line)
        if request is None:
            raise BadRequest("the request line is not METHOD /path HTTP/1.1")
        if len(lines) > MAX_HEADERS:
            raise BadRequest(f"{len(lines)} headers; at most {MAX_HEADERS} are accepted", 431)
        headers = [_header(line) for line in lines]
        self._method, url, self._version = request[1], request[2], "1." + request[3].decode()
        if self._method == b"CONNECT":
            raise BadRequest("this is no proxy")
        chunked = self._framing(headers)
        wishes = [token.strip().lower() for value in _all(headers, b"connection") for token in value.split(b",")]
        self._keep_alive = self._version == "1.1" and b"close" not in wishes
        self._receiver.on_message_begin()
        self._receiver.on_url(url)
        for name, value in headers:
            if name not in _NOT_FORWARDED:
                self._receiver.on_header(name, value)
        self._step = self._chunk if chunked else self._body
        self._receiver.on_headers_complete()
        if not chunked and not self._left:
            self._complete()

    def _framing(self, headers: list[tuple[bytes, bytes]]) -> bool:
        """Whether the body comes in chunks; if not, its length is `_left`."""
        lengths, codings = _all(headers, b"content-length"), _all(headers, b"transfer-encoding")
        if len(_all(headers, b"host")) > 1:
            raise BadRequest("there is more than one Host header")
        if len(lengths) > 1 or (lengths and codings):
            raise BadRequest("the length of the body is given twice")
        if codings and ([coding.lower() for coding in codings] != [b"chunked"] or self._version == "1.0"):
            raise BadRequest("the only transfer encoding is chunked, in HTTP/1.1")
        if lengths and not (lengths[0].isdigit() and len(lengths[0]) <= 15):
            raise BadRequest("the content-length is not a number")
        self._left = int(lengths[0]) if lengths else 0
        return bool(codings)

    def _body(self) -> bool:
        self._take_body()
        if not self._left:
            self._complete()
        return True

    def _take_body(self) -> None:
        piece = bytes(self._buffer[: self._left])
        del self._buffer[: self._left]
        self._left -= len(piece)
        self._receiver.on_body(piece)

    def _chunk(self) -> bool:
        line = self._line(MAX_CHUNK_LINE, "the size of a chunk")
        if line is None:
            return False
        size = _CHUNK.fullmatch(line)
        if size is None:
            raise BadRequest("the size of a chunk is not a hexadecimal number")
        self._left = int(size[1], 16)
        self._trailer_bytes = 0
        self._step = self._chunk_body if self._left else self._trailer
        return True

    def _chunk_body(self) -> bool:
        if self._left:
            self._take_body()
            return True
        if len(self._buffer) < 2:
            return False
        if not self._buffer.startswith(b"\r\n"):
            raise BadRequest("a chunk is longer than its size")
        del self._buffer[:2]
        self._step = self._chunk
        return True

    def _trailer(self) -> bool:
        """Trailers are read and forgotten."""
        line = self._line(MAX_TRAILER_BYTES - self._trailer_bytes, "what follows the body")
        if line is None:
            return False
        self._trailer_bytes += len(line) + 2
        if not line:
            self._complete()
        return True

    def _line(self, most: int, what: str) -> bytes | None:
        """The next line, without its end; None = it is not complete."""
        end = self._buffer.find(b"\r\n", 0, most + 2)
        if end < 0:
            if len(self._buffer) > most:
                raise BadRequest(f"{what} is too long", 431)
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 2]
        return line

    def _complete(self) -> None:
        self._step = self._head if self._keep_alive else self._ignore
        self._receiver.on_message_complete()

    def _ignore(self) -> bool:
        """After the last request the client said it would send."""
        self._buffer.clear()
        return False


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon or not _NAME.fullmatch(name) or _NO_VALUE.search(value):
        raise BadRequest("a header is not NAME: VALUE")
    return name.lower(), value.strip(b" \t")


def _all(headers: list[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value for key, value in headers if key == name]
