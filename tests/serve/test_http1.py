"""The parser of requests: the same whatever the pieces, and nothing that two servers could read in two ways."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.serve.http1 import MAX_HEAD_BYTES, BadRequest, RequestParser


class Requests:
    """Notes what the parser tells."""

    def __init__(self) -> None:
        self.seen: list[tuple[bytes, list[tuple[bytes, bytes]], bytes, bool]] = []  # url, headers, body, complete

    def on_message_begin(self) -> None:
        self.seen.append((b"", [], b"", False))

    def on_url(self, url: bytes) -> None:
        self.seen[-1] = (url, *self.seen[-1][1:])

    def on_header(self, name: bytes, value: bytes) -> None:
        self.seen[-1][1].append((name, value))

    def on_headers_complete(self) -> None:
        pass

    def on_body(self, body: bytes) -> None:
        url, headers, so_far, _ = self.seen[-1]
        self.seen[-1] = (url, headers, so_far + body, False)

    def on_message_complete(self) -> None:
        self.seen[-1] = (*self.seen[-1][:3], True)


def parse(data: bytes, cuts: list[int] | None = None) -> list[tuple[bytes, list[tuple[bytes, bytes]], bytes, bool]]:
    requests = Requests()
    parser = RequestParser(requests)
    edges = [0, *sorted(cuts or []), len(data)]
    for begin, end in pairwise(edges):
        parser.feed_data(data[begin:end])
    return requests.seen


MANY = (
    b"POST /a?b=1 HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello"
    b"\r\nGET /b HTTP/1.1\r\nhost:  x \r\n\r\n"
    b"POST /c HTTP/1.1\r\nTransfer-Encoding: Chunked\r\n\r\n3;ext=1\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: x\r\n\r\n"
    b"GET /d HTTP/1.1\r\nConnection: close\r\n\r\nGET /not/read HTTP/1.1\r\n\r\n"
)


@settings(deadline=None)
@given(st.lists(st.integers(0, len(MANY)), max_size=30))
def test_pieces_do_not_matter(cuts: list[int]) -> None:
    assert parse(MANY, cuts) == [
        (b"/a?b=1", [(b"host", b"localhost"), (b"content-length", b"5")], b"hello", True),
        (b"/b", [(b"host", b"x")], b"", True),
        (b"/c", [(b"transfer-encoding", b"Chunked")], b"abcde", True),
        (b"/d", [(b"connection", b"close")], b"", True),
    ]


def test_a_wish_to_upgrade_is_ignored_and_the_body_read() -> None:
    head = b"POST /a HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    head += b"http2-settings: AAMA\r\n"
    first, second = parse(head + b"content-length: 20\r\n\r\nGET /x HTTP/1.1\r\n\r\n!GET /b HTTP/1.1\r\n\r\n")
    assert first[0] == b"/a" and first[2] == b"GET /x HTTP/1.1\r\n\r\n!" and first[3]
    assert [name for name, _ in first[1]] == [b"host", b"connection", b"content-length"]
    assert second[0] == b"/b"


@pytest.mark.parametrize(
    "data",
    [
        b"GET /a HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET /a HTTP/1.1\r\nhost: a\r\nHost: a\r\n\r\n",
        b"GET http://localhost/a HTTP/1.1\r\n\r\n",
        b"CONNECT localhost:80 HTTP/1.1\r\n\r\n",
        b"GET a HTTP/1.1\r\n\r\n",
        b"GET /a b HTTP/1.1\r\n\r\n",
        b"GET  /a HTTP/1.1\r\n\r\n",
        b"GET /a HTTP/2.0\r\n\r\n",
        b"GET /a\r\n\r\n",
        b"get /a HTTP/1.1\r\n\r\n",
        b"POST /a HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /a HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
        b"POST /a HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 3\r\n\r\nabc",
        b"POST /a HTTP/1.1\r\ncontent-length: 3, 3\r\n\r\nabc",
        b"POST /a HTTP/1.1\r\ncontent-length: +3\r\n\r\nabc",
        b"POST /a HTTP/1.1\r\ncontent-length: -3\r\n\r\nabc",
        b"POST /a HTTP/1.1\r\ncontent-length: \r\n\r\nabc",
        b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n",
        b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0x1\r\n",
        b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nab\r\n",
        b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\nab\r\n" + b"x" * 300,
        b"GET /a HTTP/1.1\r\nx : y\r\n\r\n",
        b"GET /a HTTP/1.1\r\nx: y\r\n folded\r\n\r\n",
        b"GET /a HTTP/1.1\r\nx: y\nz: 1\r\n\r\n",
        b"GET /a HTTP/1.1\r\nx: y\rz: 1\r\n\r\n",
        b"GET /a HTTP/1.1\r\nx: \x00\r\n\r\n",
        b"GET /a HTTP/1.1\r\nx\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=str,
)
def test_what_could_be_read_in_two_ways_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest):
        parse(data)


@pytest.mark.parametrize(
    "start",
    [
        b"GET /a HTTP/1.1\r\nx: ",
        b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1;",
        b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx: ",
    ],
    ids=str,
)
@pytest.mark.parametrize("filler", [b"a" * 4096, b"a: b\r\n" * 700], ids=["long", "many"])
def test_nothing_but_a_body_may_go_on_for_ever(start: bytes, filler: bytes) -> None:
    requests = Requests()
    parser = RequestParser(requests)
    parser.feed_data(start)
    with pytest.raises(BadRequest):
        for _ in range(2 * MAX_HEAD_BYTES // len(filler) + 2):
            parser.feed_data(filler)
    assert len(parser._buffer) < 2 * MAX_HEAD_BYTES


def test_a_head_that_comes_byte_by_byte_costs_no_more_than_its_length() -> None:
    begin = time.monotonic()
    for header in (b"x: " + b"y" * 30_000, b"x:" + b" " * 30_000 + b"y"):
        data = b"GET /a HTTP/1.1\r\n" + header + b"\r\n\r\n"
        assert parse(data, list(range(len(data))))[0][3]
    assert time.monotonic() - begin < 2


def test_between_requests_and_within_one() -> None:
    parser = RequestParser(Requests())
    assert parser.between
    parser.feed_data(b"POST /a HTTP/1.1\r\ncontent-length: 2\r\n\r\na")
    assert not parser.between
    parser.feed_data(b"b")
    assert parser.between
