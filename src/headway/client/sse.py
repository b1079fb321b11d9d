"""Server-sent events, cut out of bytes as they arrive.

Only the `data` field is kept: OpenAI-style streams have nothing else, and Anthropic-style data repeats the event's
name in its `type`. Lines may end in LF, CRLF or CR; comments (keep-alives) are skipped; several data lines of one event
are joined by a line feed.
"""

from __future__ import annotations

MAX_EVENT_BYTES = 16 * 1024 * 1024


class EventTooLong(ValueError):
    """An event did not end within MAX_EVENT_BYTES."""


class EventParser:
    """Feed bytes, get the data of every event that is complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Data of the events completed by `data`.

        Raises:
            EventTooLong: a line or an event outgrew the limit.
        """
        buffer = self._rest + data if self._rest else data
        # A trailing CR may be half of a CRLF: wait for the next byte.
        if b"\r" in buffer:
            held = b"\r" if buffer.endswith(b"\r") else b""
            buffer = buffer[: len(buffer) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        lines = buffer.split(b"\n")
        self._rest = lines.pop()
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        if len(self._rest) + sum(map(len, self._data)) > MAX_EVENT_BYTES:
            raise EventTooLong(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        return events

    def close(self) -> list[bytes]:
        """Data of an event that the end of the stream left without its blank line."""
        if self._rest or self._data:
            return self.feed(b"\n\n")
        return []
