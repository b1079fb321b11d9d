"""Server-sent events come out whole, however the bytes were cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.client import sse
from headway.client.sse import EventParser, EventTooLong

STREAM = (
    b": keep-alive\n\nevent: message\ndata: {\"a\":1}\n\ndata:no space\r\n\r\ndata: two\ndata: lines\n\nid: 7\n\n"
    b"data: \xe2\x82\xac\r\rdata: [DONE]\n\n"
)  # fmt: skip
EVENTS = [b'{"a":1}', b"no space", b"two\nlines", "€".encode(), b"[DONE]"]


def parse(*pieces: bytes) -> list[bytes]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.close()


def test_a_whole_stream() -> None:
    assert parse(STREAM) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[start:end] for start, end in itertools.pairwise(edges)]
    assert parse(*pieces) == EVENTS


def test_byte_by_byte() -> None:
    assert parse(*(STREAM[i : i + 1] for i in range(len(STREAM)))) == EVENTS


@pytest.mark.parametrize("end", [b"data: [DONE]", b"data: [DONE]\n", b"data: [DONE]\r"])
def test_an_event_that_lacks_its_blank_line_is_given_at_the_end(end: bytes) -> None:
    assert parse(b"data: a\n\n", end) == [b"a", b"[DONE]"]


def test_an_endless_event_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    with pytest.raises(EventTooLong):
        EventParser().feed(b"data: " + b"x" * 200)
