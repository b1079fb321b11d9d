"""The client against endpoints that behave, and endpoints that do not."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from headway.bench.client import BenchClient, Endpoint, Timeouts
from headway.bench.transport import Address
from headway.client.chat import Client
from headway.core.errors import BadInput
from headway.metrics.records import FailureKind, Kind, RequestRecord
from tests.bench.mock import FAULTS, MockServer, Script

APIS = ("chat", "completions", "anthropic")
FAST = Timeouts(connect=2, stall=0.3, total=0.8)


def ask(url: str, api: str = "chat", limits: Timeouts = FAST, times: int = 1, **fields: Any) -> list[RequestRecord]:
    """Send the same request `times` times, one after the other."""

    async def work() -> list[RequestRecord]:
        records = []
        async with BenchClient(Endpoint.parse(url, api, extra=json.dumps(fields)), limits) as client:
            for index in range(times):
                record = RequestRecord(index=index, intended=time.perf_counter_ns(), max_tokens=64, prompt_bytes=11)
                await client.send(client.encode("hello world", 64), record)
                records.append(record)
        return records

    return asyncio.run(work())


def one(url: str, api: str = "chat", limits: Timeouts = FAST, **fields: Any) -> RequestRecord:
    return ask(url, api, limits, **fields)[0]


@pytest.mark.parametrize("api", APIS)
def test_a_stream_is_timed_and_counted(api: str) -> None:
    with MockServer(Script(ttft=0.1, gap=0.01, chunks=20, per_chunk=3, cached=4)) as server:
        record = one(server.url, api)
    assert record.failure is None
    assert record.server_id is not None
    held_ms = int(record.server_id.removeprefix("mock-")) / 1e6
    assert record.ttft_ms is not None and held_ms <= record.ttft_ms <= held_ms + 50
    assert (record.output_tokens, record.cached_tokens, record.prompt_tokens) == (60, 4, 9)
    assert len(record.token_events()) == 20
    assert record.chunks[-1].kind is Kind.DONE


def test_the_known_pace_is_measured() -> None:
    """100 chunks, 10 ms apart, kept on an absolute timetable: TPOT is 10 ms within 1 ms."""
    with MockServer(Script(gap=0.01, chunks=60)) as server:
        record = one(server.url, limits=Timeouts())
    assert record.tpot_ms == pytest.approx(10, abs=1)


def test_reasoning_comes_before_the_answer() -> None:
    with MockServer(Script(gap=0.005, chunks=10, reasoning=5)) as server:
        record = one(server.url)
    assert record.ttft_ms is not None and record.ttfa_ms is not None
    assert record.ttfa_ms > record.ttft_ms + 10
    assert record.reasoning_tokens == 5


EXPECTED = {
    "hang": FailureKind.HUNG,
    "hang_mid": FailureKind.HUNG,
    "drip": FailureKind.SLOW,
    "half_close": FailureKind.HALF_CLOSED,
    "status_500": FailureKind.HTTP,
    "status_429": FailureKind.HTTP,
    "status_404": FailureKind.HTTP,
    "error_event": FailureKind.ERROR_EVENT,
    "bad_json": FailureKind.MALFORMED,
    "not_http": FailureKind.MALFORMED,
    "no_stream": FailureKind.MALFORMED,
    "empty": FailureKind.EMPTY,
    "usage_high": FailureKind.WRONG_USAGE,
    "usage_low": FailureKind.WRONG_USAGE,
    "usage_negative": FailureKind.WRONG_USAGE,
    "wrong_prompt": FailureKind.WRONG_USAGE,
}
HARMLESS = ("", "no_usage", "no_done", "usage_more", "prompt_double")  # the last two lie, but plausibly
KEEPS_CHUNKS = ("hang_mid", "drip", "half_close", "error_event", "bad_json", "usage_high", "usage_low", "wrong_prompt")


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("fault", EXPECTED)
def test_every_fault_is_named_and_what_was_measured_is_kept(fault: str, api: str) -> None:
    with MockServer(Script(gap=0.001, fault=fault)) as server:
        record = one(server.url, api)
    assert record.failure is not None and record.failure.kind is EXPECTED[fault]
    assert record.failure.message and "\n" not in record.failure.message
    assert record.ended > 0
    assert (record.ttft_ms is not None) == (fault in KEEPS_CHUNKS or fault == "usage_negative")


def test_no_fault_of_the_mock_is_left_out() -> None:
    assert set(FAULTS) == EXPECTED.keys() | set(HARMLESS)


@pytest.mark.parametrize("fault", HARMLESS)
def test_what_is_harmless_is_no_failure(fault: str) -> None:
    with MockServer(Script(fault=fault)) as server:
        assert one(server.url).failure is None


def test_a_queued_request_is_not_taken_for_a_hung_one_while_others_are_served() -> None:
    """The first is silent for longer than the stall limit, but the second streams meanwhile."""
    waits = iter([0.8, 0.0])

    async def work() -> list[RequestRecord]:
        async with BenchClient(Endpoint.parse(server.url, "chat"), Timeouts(stall=0.3, total=5)) as client:
            records = [
                RequestRecord(index=i, intended=time.perf_counter_ns(), max_tokens=64, prompt_bytes=9) for i in range(2)
            ]
            await asyncio.gather(*(client.send(client.encode("a b c", 64), record) for record in records))
            return records

    with MockServer(lambda _: Script(ttft=next(waits), gap=0.02, chunks=40)) as server:
        records = asyncio.run(work())
    assert [record.failure for record in records] == [None, None]


def test_connections_are_reused() -> None:
    with MockServer(Script()) as server:
        records = ask(server.url, times=3)
    assert [record.reused for record in records] == [False, True, True]


@contextmanager
def raw_server(*answers: bytes, keep_open: bool = False) -> Iterator[str]:
    """A server that answers each connection with fixed bytes, then closes it."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_ones = []

    def serve() -> None:
        for answer in answers:
            connection, _ = listener.accept()
            connection.recv(65536)
            connection.sendall(answer)
            if keep_open:
                connection.shutdown(socket.SHUT_WR)  # half-closed: it can still listen
                open_ones.append(connection)
            else:
                connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread.join(5)
    listener.close()
    for connection in open_ones:
        connection.close()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
BODY = (
    b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    b'data: {"choices":[{"delta":{"content":"b"},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
)  # fmt: skip
START = BODY[: BODY.index(b"\n\n") + 2]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + BODY, None),
        (HEAD + b"connection: close\r\n\r\n" + BODY, None),
        (HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY, None),
        (HEAD + b"connection: close\r\n\r\n" + START, FailureKind.HALF_CLOSED),
        (HEAD + b"content-length: 9999\r\n\r\n" + BODY, FailureKind.HALF_CLOSED),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(START), START), FailureKind.HALF_CLOSED),
        (HEAD + b"connection: close\r\n\r\n", FailureKind.HALF_CLOSED),
        (HEAD, FailureKind.HALF_CLOSED),
        (b"", FailureKind.HALF_CLOSED),
        (b"HTTP/1.1 307 Moved\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n", FailureKind.HTTP),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", FailureKind.MALFORMED),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY, None),
    ],
)
@pytest.mark.parametrize("keep_open", [False, True])
def test_how_an_answer_may_end(answer: bytes, kind: FailureKind | None, keep_open: bool) -> None:
    with raw_server(answer, keep_open=keep_open) as url:
        record = one(url)
    assert (record.failure.kind if record.failure else None) is kind, record.failure


def test_an_idle_connection_that_was_closed_meanwhile_costs_one_more_try() -> None:
    kept = HEAD + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    with raw_server(kept, kept) as url:
        records = ask(url, times=2)
    assert [record.failure for record in records] == [None, None]


def test_a_refused_connection_is_a_failure_of_its_own_kind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    record = one(url)
    assert record.failure is not None and record.failure.kind is FailureKind.CONNECT


def test_an_unknown_host_is_bad_input() -> None:
    with pytest.raises(BadInput, match="unknown"):
        one("http://no-such-host.invalid")


@pytest.mark.parametrize(
    ("url", "api", "path"),
    [
        ("http://h:1", "chat", "/v1/chat/completions"),
        ("http://h:1/", "chat", "/v1/chat/completions"),
        ("http://h:1/v1", "completions", "/v1/completions"),
        ("http://h:1/v1/messages", None, "/v1/messages"),
        ("http://h:1/api/v2/chat/completions", None, "/api/v2/chat/completions"),
        ("https://h/openai/v1/", "chat", "/openai/v1/chat/completions"),
    ],
)
def test_the_path_of_the_api_is_found_in_any_form_of_url(url: str, api: str | None, path: str) -> None:
    assert BenchClient(Endpoint.parse(url, api)).encode("x", 1).split(b" ")[1].decode() == path


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"url": "ftp://h"}, "--url"),
        ({"url": "h:8000"}, "--url"),
        ({"url": "http://h:99999"}, "--url"),
        ({"url": "http://h", "api": "grpc"}, "--api"),
        ({"url": "http://h/v1/messages", "api": "chat"}, "--api"),
        ({"url": "http://h", "extra": "[1]"}, "--extra"),
        ({"url": "http://h", "key": "a\nb"}, "the API key"),
    ],
)
def test_bad_endpoints_are_refused(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(BadInput) as error:
        Endpoint.parse(**({"api": None} | arguments))
    assert error.value.field == field


@pytest.mark.parametrize("name", ["connect", "stall", "total"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_limits_are_above_zero(name: str, value: float) -> None:
    with pytest.raises(BadInput):
        Timeouts(**{name: value})


def test_extra_fields_are_merged_and_null_removes_one() -> None:
    with MockServer(Script()) as server:
        one(server.url, temperature=None, top_k=3)
    assert server.requests[0]["top_k"] == 3
    assert "temperature" not in server.requests[0]
    assert server.requests[0]["stream_options"] == {"include_usage": True}


def test_without_usage_chunks_count_for_tokens_only_if_that_is_asked_for() -> None:
    async def work(count: bool) -> RequestRecord:
        async with BenchClient(replace(Endpoint.parse(server.url, "chat"), count_chunks=count)) as client:
            record = RequestRecord(index=0, intended=time.perf_counter_ns(), max_tokens=64)
            await client.send(client.encode("hello", 64), record)
            return record

    with MockServer(Script(fault="no_usage", chunks=9)) as server:
        assert asyncio.run(work(False)).output_tokens is None
        assert asyncio.run(work(True)).output_tokens == 9


def test_a_key_travels_in_the_header_each_api_wants() -> None:
    openai = Endpoint.parse("http://h", "chat", key="k").headers
    anthropic = Endpoint.parse("http://h", "anthropic", key="k").headers
    assert openai["authorization"] == anthropic["authorization"] == "Bearer k"
    assert anthropic["x-api-key"] == "k" and "anthropic-version" in anthropic


@pytest.mark.parametrize("url", ["http://[::1", "http://[x]:80", "http://h:99999", "ftp://h"])
def test_what_is_no_address_is_refused_in_a_sentence(url: str) -> None:
    for made in (Address.of, Client):
        with pytest.raises(BadInput, match="--url"):
            made(url)
