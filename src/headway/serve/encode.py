"""JSON as bytes, server-sent events, and templates: what stays the same over a stream is encoded once."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

_HOLE = "\x00hole\x00"
_encode = msgspec.json.Encoder().encode


def json_bytes(value: object) -> bytes:
    """`value` as JSON that no line splitter cuts: U+2028, U+2029 and U+0085 are escaped as well."""
    data = _encode(value)
    if b"\xe2\x80" in data or b"\xc2\x85" in data:
        data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
        data = data.replace(b"\xc2\x85", b"\\u0085")
    return data


def event(value: object) -> bytes:
    """A server-sent event."""
    return b"data: " + json_bytes(value) + b"\n\n"


def timestamp(at: float | None = None) -> str:
    """RFC 3339 of Unix seconds `at`; None = now."""
    time = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
    return time.isoformat().replace("+00:00", "Z")


def hole(index: int) -> str:
    """Stands in a template's value where the `index`-th piece of JSON goes."""
    return f"{_HOLE}{index}"


class Template:
    """Bytes with holes.

    Args:
        data: encoded, with `hole(0)`, `hole(1)`, ... in it, in this order.
        holes: how many there are.
    """

    def __init__(self, data: bytes, holes: int) -> None:
        pieces = []
        for index in range(holes):
            before, _, data = data.partition(_encode(hole(index)))
            pieces.append(before)
        self.pieces = (*pieces, data)

    def fill(self, *values: bytes) -> bytes:
        """The bytes, with JSON `values` in their holes."""
        pieces = self.pieces
        if len(values) == 1:
            return pieces[0] + values[0] + pieces[1]
        parts = [pieces[0]]
        for value, piece in zip(values, pieces[1:], strict=True):
            parts.append(value)
            parts.append(piece)
        return b"".join(parts)
