"""Events on disk: JSON lines, a header first. Enough to replay every plan, to fit the step-time model, and to share a
bill among rows; no text and no token ids.

    {"event":"header","format":"headway-events","version":3,"limits":{...},"policy":"chunked",...}
    {"event":"queued","now":...,"id":"a","number":0,"prompt_tokens":40,"max_len":56,"names":["...","..."]}
    {"event":"planned","now":...,"step":0,"digest":"..."}
    {"event":"step","now":...,"step":0,"planned":...,"rows":[0],"counts":[40],"emitted":[1],"seconds":{...},...}

Bytes are base64. What was drained before a step lies between the "step" line before it and its "planned" line.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from headway.core.errors import HeadwayError
from headway.core.events import FORMAT, VERSION, AnyEvent, Header, StepDone

logger = logging.getLogger(__name__)

MOST_LINE_BYTES = 1 << 24  # the names of a prompt of 20 million tokens


class EventFileError(HeadwayError):
    """An event file is truncated, foreign, or too large. Names file, line and fault."""

    exit_code = 2


class EventWriter:
    """Writes events to a file; subscribe it to an `EventLog`. Flushed at once and after every step. A context manager.

    Raises:
        EventFileError: the file cannot be written, at any time.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self._encoder = msgspec.json.Encoder()
        self._path = path
        with self._told():
            self._file = open(path, "wb")  # noqa: SIM115  closed by `close`
        self._write(header)
        with self._told():
            self._file.flush()

    def __call__(self, event: AnyEvent) -> None:
        self._write(event)
        if isinstance(event, StepDone):
            with self._told():
                self._file.flush()

    def _write(self, line: Header | AnyEvent) -> None:
        with self._told():
            self._file.write(self._encoder.encode(line) + b"\n")

    def close(self) -> None:
        with self._told():
            self._file.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise EventFileError(f"{self._path}: the event log cannot be written: {error.strerror or error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class ServerEventWriter(EventWriter):
    """An `EventWriter` that a server outlives: when the disk is full it says so, cuts off what is incomplete, and only
    counts from then on. Where the events after the header grew beyond `max_bytes` it begins anew as soon as no request
    is live; at twice that, between any two steps. (The header lists the blocks that are cached: counted too, a long one
    would push out the file before it, with nothing in it yet.)

    Attributes:
        lost: events that were not written.
    """

    def __init__(self, path: Path, header: Header, max_bytes: float = math.inf) -> None:
        self.lost = 0
        self._max_bytes = max_bytes
        self._header = header
        super().__init__(path, header)
        self._mark()

    def __call__(self, event: AnyEvent) -> None:
        if self._file.closed:
            self.lost += 1
            return
        try:
            super().__call__(event)
            if isinstance(event, StepDone):
                self._complete = self._file.tell()
                if self._complete - self._begun >= 2 * self._max_bytes:
                    self._begin_anew(
                        msgspec.structs.replace(self._header, step=event.step + event.steps, cache=(), midway=True)
                    )
        except EventFileError as error:
            self._give_up(error)

    def rotate(self, header: Callable[[Header], Header]) -> None:
        """Call it while no request is live: if the file is full, it becomes PATH.1, and a new one begins, with what
        `header` makes of the first header."""
        if not self._file.closed and self._complete - self._begun >= self._max_bytes:
            self._begin_anew(header(self._header))

    def _begin_anew(self, header: Header) -> None:
        try:
            super().close()
            os.replace(self._path, f"{self._path}.1")
            super().__init__(self._path, header)
            self._mark()
        except (EventFileError, OSError) as error:
            self._give_up(error)

    def _mark(self) -> None:
        self._begun = self._complete = self._file.tell()  # bytes of the header; up to the end of a step

    def close(self) -> None:
        if not self._file.closed:
            try:
                super().close()
            except EventFileError as error:
                self._give_up(error)
        if self.lost:
            logger.warning("%s: %d events were not written", self._path, self.lost)

    def _give_up(self, error: Exception) -> None:
        logger.error("%s; serving goes on without it", error)
        self.lost += 1
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            os.truncate(self._path, self._complete)


def read_header(path: Path) -> Header:
    """The first line. EventFileError if this is not an event file this version can read."""
    with open(path, "rb") as file:
        line = file.readline(MOST_LINE_BYTES)
    try:
        about = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        named, version = (msgspec.json.decode(about[name]) for name in ("format", "version"))
    except (msgspec.DecodeError, KeyError):
        raise EventFileError(f"{path}: not an event file (its first line is no header)") from None
    if named != FORMAT:
        raise EventFileError(f"{path}: not an event file (its format is {named!r}, not {FORMAT!r})")
    if version != VERSION:
        raise EventFileError(f"{path}: written in version {version!r} of the format; this program reads {VERSION}")
    try:
        return msgspec.json.decode(line, type=Header)
    except (msgspec.DecodeError, HeadwayError) as error:
        raise EventFileError(f"{path}, line 1: {error}") from None


def read_events(path: Path) -> Iterator[AnyEvent]:
    """The events in order, one line in memory at a time.

    Raises:
        EventFileError: a line is cut off, too long, or no event. Everything before it was yielded.
    """
    read_header(path)
    decoder = msgspec.json.Decoder(AnyEvent)
    with open(path, "rb") as file:
        file.readline()
        number = 1
        while line := file.readline(MOST_LINE_BYTES + 1):
            number += 1
            if len(line) > MOST_LINE_BYTES:
                raise EventFileError(f"{path}, line {number}: longer than {MOST_LINE_BYTES} bytes")
            if not line.endswith(b"\n"):
                raise EventFileError(f"{path}, line {number}: cut off; the file is incomplete")
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise EventFileError(f"{path}, line {number}: {error}") from None
