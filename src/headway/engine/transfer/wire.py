"""Frames between two engines, and the handshake before them.

    decode -> prefill   MAGIC version | nonce
    prefill -> decode   MAGIC version | nonce | layout | proof      both prove that they know the secret; the layout
    decode -> prefill                           layout | proof      is a hash of all that the bytes of a block depend on
    then frames:        kind u8 | length u32 | checksum 16 | payload

The checksum is BLAKE2b under a key of this connection, over direction, number of the frame, kind and payload: a frame
that was changed, left out, repeated or turned back ends the connection. Nothing is encrypted. Lengths are bounded by
what either side expects before anything is allocated.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
from enum import IntEnum
from hashlib import blake2b

from headway.engine.transfer.ticket import derived

MAGIC = b"HWKVXFER"
VERSION = 1
LAYOUT_BYTES = 16
MOST_CONTROL = 4 << 20  # bytes of a frame without a block: names of a million tokens
_NONCE = _PROOF = _SUM = 16
_FRAME = struct.Struct("<BI16s")
_GREETING = struct.Struct("<8sI16s")


class Broken(Exception):
    """The connection cannot be used any more. One sentence."""


class FrameKind(IntEnum):
    ASK = 1  # ticket 16 | shared memory's name, or nothing, up to a zero byte | (group u32 | name 16) each
    BEAT = 2  # still here
    BLOCK = 3  # group u32 | name 16 | the block
    SHARED = 4  # group u32 | name 16 | slot u32 | checksum 16 of the block there
    FREE = 5  # slot u32: it was read
    MISSING = 6  # why the rest does not come, UTF-8
    DONE = 7  # all was sent


class Wire:
    """One end of a connection, after the handshake.

    Args:
        key: of the connection. asks: this end is the one that asks.
        largest: bytes of a payload that may come.
    """

    def __init__(self, sock: socket.socket, key: bytes, asks: bool, largest: int) -> None:
        self._sock, self._key, self._largest = sock, key, largest
        self._out, self._in = (b">", b"<") if asks else (b"<", b">")
        self._sent = self._got = 0

    def checksum(self, *parts: bytes | memoryview) -> bytes:
        """Under the key of this connection."""
        return _sum(self._key, *parts)

    def send(self, kind: FrameKind, *parts: bytes | memoryview) -> None:
        """
        Raises:
            Broken: it does not arrive.
        """
        total = _sum(self._key, self._out, self._sent.to_bytes(8, "little"), bytes((kind,)), *parts)
        self._sent += 1
        try:
            self._sock.sendall(_FRAME.pack(kind, sum(map(len, parts)), total))
            for part in parts:
                self._sock.sendall(part)
        except OSError as error:
            raise Broken(f"sending failed: {error.strerror or error}") from None

    def waiting(self, seconds: float) -> bool:
        """Whether something comes within so many seconds.

        Raises:
            Broken: the connection is closed on this side.
        """
        try:
            return bool(select.select([self._sock], [], [], seconds)[0])
        except (OSError, ValueError):
            raise Broken("the connection was closed") from None

    def receive(self) -> tuple[FrameKind, memoryview]:
        """The next frame.

        Raises:
            Broken: it does not come, or is not what was sent.
        """
        code, length, total = _FRAME.unpack(exactly(self._sock, _FRAME.size))
        if code not in FrameKind.__members__.values() or length > self._largest:
            raise Broken(f"a frame of kind {code} and {length} bytes is none that is expected")
        payload = exactly(self._sock, length)
        expected = _sum(self._key, self._in, self._got.to_bytes(8, "little"), bytes((code,)), payload)
        if not hmac.compare_digest(expected, total):
            raise Broken("a frame is not what was sent")
        self._got += 1
        return FrameKind(code), payload


def greet(sock: socket.socket, secret: bytes, layout: bytes, asks: bool, largest: int) -> Wire:
    """The handshake.

    Raises:
        Broken: the other does not know the secret, is of another version, or has blocks of another layout.
    """
    own = secrets.token_bytes(_NONCE)
    key = derived(secret, "handshake")
    try:
        sock.sendall(_GREETING.pack(MAGIC, VERSION, own))
        magic, version, other = _GREETING.unpack(exactly(sock, _GREETING.size))
        if magic != MAGIC or version != VERSION:
            raise Broken(f"it speaks version {version}, and this engine {VERSION}" if magic == MAGIC else "no engine")
        nonces = own + other if asks else other + own
        if not asks:
            sock.sendall(layout + _sum(key, b"gives", nonces, layout))
        theirs = bytes(exactly(sock, LAYOUT_BYTES + _PROOF))
        if asks:
            sock.sendall(layout + _sum(key, b"asks", nonces, layout))
    except OSError as error:
        raise Broken(f"the handshake failed: {error.strerror or error}") from None
    proof = _sum(key, b"gives" if asks else b"asks", nonces, theirs[:LAYOUT_BYTES])
    if not hmac.compare_digest(proof, theirs[LAYOUT_BYTES:]):
        raise Broken("the other does not know the secret of this pool")
    if theirs[:LAYOUT_BYTES] != layout:
        raise Broken("the other has another model, backend, cache format or block size")
    return Wire(sock, _sum(key, b"frames", nonces, layout), asks, largest)


def exactly(sock: socket.socket, count: int) -> memoryview:
    """So many bytes.

    Raises:
        Broken: they do not come.
    """
    data = bytearray(count)
    view, at = memoryview(data), 0
    try:
        while at < count:
            got = sock.recv_into(view[at:])
            if not got:
                raise Broken("the other has closed the connection")
            at += got
    except OSError as error:
        raise Broken(f"receiving failed: {error.strerror or error}") from None
    return view


def _sum(key: bytes, *parts: bytes | memoryview) -> bytes:
    digest = blake2b(key=key, digest_size=_SUM)
    for part in parts:
        digest.update(part)
    return digest.digest()
