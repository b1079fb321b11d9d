"""A server of known timing on the loopback: the ruler that the client is held against.

Run as `python -m headway.bench.mock ['{"ttft": 0.01}']` it serves in a process of its own, prints its port on the
first line of stdout, and ends when its stdin closes, so it cannot outlive the run that started it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar, cast

import httptools

from headway.bench.pace import Pacer
from headway.engine.machine import event_loop_factory
from headway.metrics.records import NS_PER_S

BATCH = 16  # chunks a stream without gaps writes before the others get their turn


@dataclass(frozen=True)
class Script:
    """How it answers: `chunks` chunks of `per_chunk` tokens, the first after `ttft` seconds, then one per `gap`."""

    ttft: float = 0.0
    gap: float = 0.0
    chunks: int = 16
    per_chunk: int = 1


S = TypeVar("S", bound=Script)


def prompt_text(body: dict[str, Any]) -> str:
    if "messages" in body:
        return " ".join(str(message.get("content", "")) for message in body["messages"])
    return str(body.get("prompt", ""))


class MockStream(Generic[S]):
    """One answer being written, chunk by chunk, as a stream of chat completions."""

    def __init__(self, transport: asyncio.Transport, script: S, path: bytes, body: dict[str, Any], at: int) -> None:
        self.transport = transport
        self.script = script
        self.path = path
        self.body = body
        self.done = 0
        self.id = "mock"
        self._asked = at
        self._due = 0.0

    def begin(self) -> None:
        if self.transport.is_closing():
            return
        self.id = f"mock-{time.perf_counter_ns() - self._asked}"
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            + framed(self.opening())
        )
        self._due = asyncio.get_running_loop().time()
        self._same = framed(self.text())
        self.step()

    def step(self) -> None:
        """Write what is due, then wait for the next gap (or give way, without one)."""
        loop = asyncio.get_running_loop()
        for _ in range(1 if self.script.gap else BATCH):
            if self.transport.is_closing():
                return
            if self.done == self.script.chunks:
                self.transport.write(framed(self.end()) + b"0\r\n\r\n")
                return
            if not self.chunk():
                return
            self.done += 1
        if self.script.gap:
            self._due += self.script.gap
            loop.call_at(self._due, self.step)
        else:
            loop.call_soon(self.step)

    def chunk(self) -> bool:
        """Write the next one -> whether the stream goes on."""
        self.transport.write(self._same)
        return True

    def opening(self) -> bytes:
        return event(self.choice(delta={"role": "assistant", "content": ""}))

    def text(self) -> bytes:
        return event(self.choice(delta={"content": "word " * self.script.per_chunk}))

    def end(self) -> bytes:
        return event(self.choice(delta={}, finish_reason="stop")) + self.usage() + b"data: [DONE]\n\n"

    def usage(self) -> bytes:
        counts = {"prompt_tokens": self.prompt_tokens(), "completion_tokens": self.output_tokens()}
        return event(self.frame() | {"usage": counts})

    def prompt_tokens(self) -> int:
        return len(prompt_text(self.body).split()) + 7

    def output_tokens(self) -> int:
        return self.done * self.script.per_chunk

    def frame(self, *choices: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk"
        return {"id": self.id, "object": kind, "created": 1, "model": "mock", "choices": list(choices)}

    def choice(self, **fields: Any) -> dict[str, Any]:
        return self.frame({"index": 0, "finish_reason": None} | fields)


class MockConnection(asyncio.Protocol, Generic[S]):
    """A connection that answers as `script` says, by streams of the kind `stream`."""

    stream: type[MockStream[Any]] = MockStream

    def __init__(self, script: Callable[[dict[str, Any]], S], pacer: Pacer) -> None:
        self._script = script
        self._pacer = pacer
        self._body = b""
        self._path = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._body, self._path = b"", b""

    def on_url(self, url: bytes) -> None:
        self._path += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        now = time.perf_counter_ns()
        if self._parser.get_method() != b"POST":
            self._get()
            return
        body = json.loads(self._body)
        script = self._script(body)
        if not body.get("stream"):
            usage = {"prompt_tokens": len(prompt_text(body).split()) + 7, "completion_tokens": 1}
            self._transport.write(whole(200, json.dumps({"choices": [], "usage": usage}).encode()))
            return
        stream = self.stream(self._transport, script, self._path, body, now)
        if script.ttft:
            self._pacer.at(now + round(script.ttft * NS_PER_S), stream.begin)
        else:
            stream.begin()

    def _get(self) -> None:
        if self._path.endswith(b"/models"):
            self._transport.write(whole(200, b'{"object":"list","data":[{"id":"mock","object":"model"}]}'))
        elif self._path.endswith(b"/health"):  # some clients ask before they start
            self._transport.write(whole(200, b"{}"))
        else:
            self._transport.write(whole(404, b'{"error":{"message":"no such route"}}'))


def event(data: dict[str, Any]) -> bytes:
    name = f"event: {data['type']}\n".encode() if "type" in data else b""
    return name + b"data: " + json.dumps(data).encode() + b"\n\n"


def framed(data: bytes) -> bytes:
    """As one piece of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n" if data else b""


def whole(status: int, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@asynccontextmanager
async def serving(
    script: Callable[[dict[str, Any]], S], connection: type[MockConnection[S]] = MockConnection
) -> AsyncIterator[int]:
    """Listens on a free loopback port, the value of the context."""
    with Pacer() as pacer:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: connection(script, pacer), "127.0.0.1", 0, backlog=4096)
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            server.close()  # without waiting for those still connected: some of them are meant to be left hanging


def script_of(body: dict[str, Any], default: Script = Script()) -> Script:
    """A script from a request's `mock` field, so that one process serves every phase of a self-test."""
    known = {field.name for field in fields(Script)}
    return replace(default, **{name: value for name, value in body.get("mock", {}).items() if name in known})


async def _main() -> None:
    default = script_of({"mock": json.loads(sys.argv[1])} if len(sys.argv) > 1 else {})
    async with serving(lambda body: script_of(body, default)) as port:
        print(port, flush=True)
        gc.freeze()  # so that a collection has little to walk through in the middle of a stream
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        runner.run(_main())
