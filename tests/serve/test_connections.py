"""Connections that do what they should not: smuggle, go on for ever, take nothing, or close half."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvicorn

from headway.serve import protocol
from tests.serve.conftest import Server
from tests.serve.test_answers import CHAT, TEXT

Start = Callable[..., Server]


def post(body: dict[str, Any], extra: str = "", path: str = TEXT) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{extra}"
    return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


def exchange(server: Server, data: bytes, half_close: bool = False) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.settimeout(20)
        raw.sendall(data)
        if half_close:
            raw.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := raw.recv(65536):
                answer += piece
        return answer


@pytest.mark.parametrize("upgrade", ["h2c", "websocket", "TLS/1.0"])
def test_a_body_under_upgrade_is_a_body(server: Server, upgrade: str) -> None:
    """What stands in the first body is no second request."""
    inner = "GET /version HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    wish = f"connection: Upgrade, HTTP2-Settings\r\nupgrade: {upgrade}\r\nhttp2-settings: AAMAAABkAAQ\r\n"
    last = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    answer = exchange(server, post({"prompt": "say:hi", "user": inner}, wish) + last)
    assert answer.count(b"HTTP/1.1 200") == 2 and b'"text":"hi"' in answer
    assert b'"version"' not in answer and b'"status":"ok"' in answer


@pytest.mark.parametrize(
    "data",
    [
        b"GET /version HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n",
        b"GET http://localhost/version HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /a HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n",
        b"\x16\x03\x01garbage\r\n\r\n",
        b"GET //\x7f HTTP/1.1\r\n\r\n",
    ],
    ids=str,
)
def test_a_request_that_could_be_read_in_two_ways_is_400(server: Server, data: bytes) -> None:
    answer = exchange(server, data)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"connection: close" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"


def test_garbage_after_a_request_costs_the_connection_and_not_the_answer(server: Server) -> None:
    answer = exchange(server, post({"prompt": "count", "max_tokens": 20}) + b"\x00garbage\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == 1 and b'"text":"01234' in answer


def test_trailers_without_end_are_cut_off(server: Server) -> None:
    body = json.dumps({"prompt": "say:hi"}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    start = head + b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    assert b'"text":"hi"' in exchange(server, start + b"x-sum: 1\r\n\r\n", half_close=True)
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.settimeout(10)
        sent = 0
        with contextlib.suppress(OSError):
            raw.sendall(start)
            while sent < 16 << 20:
                sent += raw.send(b"x-trailer: and so on\r\n" * 1000)
        assert sent < 16 << 20


@pytest.mark.parametrize("plain_loop", [False, True])
def test_who_shuts_down_the_sending_side_is_answered_and_who_leaves_is_noticed(start: Start, plain_loop: bool) -> None:
    """Reported t2-024."""
    server = start(engine={"seconds": 0.02}, plain_loop=plain_loop)
    for stream in (False, True):
        for tokens in (3, 60):  # before and after the first sign of life
            body = {"prompt": "count", "max_tokens": tokens, "stream": stream}
            answer = exchange(server, post(body), half_close=True)
            statuses = [line for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
            assert statuses[-1] == b"HTTP/1.1 200 OK" and set(statuses[:-1]) <= {b"HTTP/1.1 100 Continue"}
            assert answer.count(b'"text":"') == (tokens + 1 if stream else 1)
    assert b"100 Continue" in answer or stream
    for stream in (False, True):
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.port)) as raw:
                raw.sendall(post({"prompt": "count", "max_tokens": 4000, "stream": stream}))
                raw.shutdown(socket.SHUT_WR)
    server.wait_idle(1.5)


def test_half_of_a_request_and_no_more_is_no_request(server: Server) -> None:
    assert exchange(server, post({"prompt": "say:hi"})[:-3], half_close=True) == b""
    assert exchange(server, b"GET /vers", half_close=True) == b""


Serving = Callable[[Any], Any]


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[tuple[uvicorn.Server, int]]:
    config = uvicorn.Config(app, port=0, http=protocol.GuardedProtocol, lifespan="off", log_level="critical")
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server, server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await task


async def large(scope: Any, receive: Any, send: Any) -> None:
    """Answers 8 MB, at once or piece by piece."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(8 if scope["path"] == "/pieces" else 0):
        await send({"type": "http.response.body", "body": b"x" * 1_000_000, "more_body": True})
    rest = b"" if scope["path"] == "/pieces" else b"x" * 8_000_000
    await send({"type": "http.response.body", "body": rest})


@pytest.mark.parametrize("path", ["/pieces", "/whole"])
@pytest.mark.parametrize("leave", [False, True])
def test_who_takes_nothing_is_given_up(path: str, leave: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "STALL_SECONDS", 0.3)

    async def run() -> None:
        async with serving(large) as (server, port):
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
            connection = "close" if leave else "keep-alive"
            writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: {connection}\r\n\r\n".encode())
            await asyncio.sleep(0.1)
            assert server.server_state.connections
            end = time.monotonic() + 5
            while server.server_state.connections and time.monotonic() < end:
                for one in list(server.server_state.connections):
                    one.sweep(time.monotonic())  # type: ignore[union-attr]
                await asyncio.sleep(0.02)
            assert not server.server_state.connections
            writer.transport.abort()

    asyncio.run(run())


def test_who_takes_slowly_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "STALL_SECONDS", 0.3)

    async def run() -> int:
        async with serving(large) as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
            writer.write(b"GET /whole HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            taken = 0
            while piece := await reader.read(200_000):
                taken += len(piece)
                for one in list(server.server_state.connections):
                    one.sweep(time.monotonic())  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
            writer.close()
            return taken

    assert asyncio.run(run()) > 8_000_000


def test_a_full_server_can_still_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_CONNECTIONS", 12)
    monkeypatch.setattr(protocol, "RESERVED", 4)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def status(port: int, path: str) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        line = await reader.readline()
        writer.close()
        return line

    async def run() -> None:
        async with serving(app) as (_, port):
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
            assert b"503" in await status(port, "/v1/models")
            for _ in range(10):
                assert b"200" in await status(port, "/health")
            for _, writer in idle:
                writer.close()
            await asyncio.sleep(0.05)
            assert b"200" in await status(port, "/v1/models")

    asyncio.run(run())


def test_chat_over_a_half_closed_connection(tiny: Server) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50}
    assert b"HTTP/1.1 200 OK" in exchange(tiny, post(body, path=CHAT), half_close=True)
