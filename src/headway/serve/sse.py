"""Server-sent events as bytes. What stays the same over a stream is encoded once; per chunk only the text is."""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
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
    return b"data: " + json_bytes(value) + b"\n\n"


class Template:
    """An event with holes, encoded once.

    Args:
        value: the event; `Template.hole(i)` stands where the i-th piece of JSON goes.
        holes: how many there are, in the order they appear in `value`.
    """

    def __init__(self, value: object, holes: int) -> None:
        data = event(value)
        pieces = []
        for index in range(holes):
            before, _, data = data.partition(_encode(self.hole(index)))
            pieces.append(before)
        self._pieces = (*pieces, data)

    @staticmethod
    def hole(index: int) -> str:
        return f"{_HOLE}{index}"

    def fill(self, *values: bytes) -> bytes:
        """The event, with JSON `values` in its holes."""
        pieces = self._pieces
        if len(values) == 1:
            return pieces[0] + values[0] + pieces[1]
        parts = [pieces[0]]
        for value, piece in zip(values, pieces[1:], strict=True):
            parts.append(value)
            parts.append(piece)
        return b"".join(parts)
