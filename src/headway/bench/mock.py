"""A server of known timing on the loopback: the ruler that the client is held against, and the villain of its tests.

Run as `python -m headway.bench.mock ['{"ttft": 0.01}']` it serves in a process of its own, prints its port on the
first line of stdout, and ends when its stdin closes, so it cannot outlive the run that started it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Any, cast

import httptools

from headway.bench.pace import NS_PER_S, Pacer
from headway.engine.machine import event_loop_factory

FAULTS = (
    "", "hang", "hang_mid", "drip", "half_close", "status_500", "status_429", "error_event", "bad_json", "not_http",
    "no_stream", "empty", "usage_high", "usage_low", "usage_negative", "no_usage", "no_done", "wrong_prompt",
    "usage_more", "prompt_double",
)  # fmt: skip
BATCH = 16  # chunks a stream without gaps writes before the others get their turn


@dataclass(frozen=True)
class Script:
    """How the mock answers: `chunks` chunks of `per_chunk` tokens, the first after `ttft` seconds, then one per `gap`.

    Attributes:
        reasoning: how many of the first chunks are reasoning.
        fault: what goes wrong, one of FAULTS; after `fault_after` chunks where it happens inside the stream.
        cached: prompt tokens reported as cached.
    """

    ttft: float = 0.0
    gap: float = 0.0
    chunks: int = 16
    per_chunk: int = 1
    reasoning: int = 0
    fault: str = ""
    fault_after: int = 3
    cached: int = 0


def prompt_text(body: dict[str, Any]) -> str:
    if "messages" in body:
        return " ".join(str(message.get("content", "")) for message in body["messages"])
    return str(body.get("prompt", ""))


class MockConnection(asyncio.Protocol):
    def __init__(
        self, script: Callable[[dict[str, Any]], Script], pacer: Pacer, log: list[dict[str, Any]] | None
    ) -> None:
        self._script = script
        self._pacer = pacer
        self._log = log
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
        if self._log is not None:
            self._log.append(body)
        script = self._script(body)
        if not body.get("stream"):
            usage = {"prompt_tokens": len(prompt_text(body).split()) + 7, "completion_tokens": 1}
            self._transport.write(whole(200, json.dumps({"choices": [], "usage": usage}).encode()))
            return
        stream = Stream(self._transport, script, self._path, body, now)
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


class Stream:
    """One answer being written, chunk by chunk."""

    def __init__(
        self, transport: asyncio.Transport, script: Script, path: bytes, body: dict[str, Any], at: int
    ) -> None:
        self._transport = transport
        self._script = script
        self._asked = at
        self._body = body
        self._done = 0
        self._style = "anthropic" if path.endswith(b"/messages") else "chat" if b"chat" in path else "completions"
        self._due = 0.0
        self._id = "mock"
        self._same = framed(b"".join(self._text(False)))

    def begin(self) -> None:
        fault = self._script.fault
        if self._transport.is_closing() or fault == "hang":
            return
        if fault in ("status_500", "status_429"):
            self._transport.write(whole(int(fault[-3:]), b'{"error":{"message":"the mock refuses"}}'))
        elif fault == "not_http":
            self._transport.write(b"I am not a web server\r\n\r\n")
        elif fault == "no_stream":
            self._transport.write(whole(200, b'{"choices":[{"message":{"content":"hi"}}]}'))
        else:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                + framed(b"".join(self._opening()))
            )
            self._due = asyncio.get_running_loop().time()
            self.step()

    def step(self) -> None:
        """Write what is due, then wait for the next gap (or give way, without one)."""
        loop, script = asyncio.get_running_loop(), self._script
        for _ in range(1 if script.gap else BATCH):
            if self._transport.is_closing():
                return
            if self._done == (0 if script.fault == "empty" else script.chunks):
                self._end()
                return
            if script.fault and self._done == script.fault_after and self._break():
                return
            chunk = framed(b"".join(self._text(True))) if self._done < script.reasoning else self._same
            self._transport.write(chunk)
            self._done += 1
        if script.gap:
            self._due += script.gap
            loop.call_at(self._due, self.step)
        else:
            loop.call_soon(self.step)

    def _break(self) -> bool:
        fault = self._script.fault
        if fault == "half_close":
            self._transport.close()
        elif fault == "drip":
            self._transport.write(framed(b": keep-alive\n\n"))
            asyncio.get_running_loop().call_later(0.02, self._break_again)
        elif fault == "error_event":
            problem = {"type": "error", "error": {"message": "the engine died", "type": "server_error"}}
            self._transport.write(framed(event(problem)) + b"0\r\n\r\n")
        elif fault == "bad_json":
            self._transport.write(framed(b"data: {not json\n\n"))
        return fault in ("half_close", "drip", "error_event", "bad_json", "hang_mid")

    def _break_again(self) -> None:
        if not self._transport.is_closing():
            self._break()

    def _opening(self) -> list[bytes]:
        held = time.perf_counter_ns() - self._asked
        self._id = f"mock-{held}"
        if self._style == "anthropic":
            usage = {"input_tokens": self._prompt_tokens() - self._script.cached, "output_tokens": 0}
            usage["cache_read_input_tokens"] = self._script.cached
            return [event({"type": "message_start", "message": {"id": self._id, "usage": usage}})]
        if self._style == "chat":
            return [event(self._choice(delta={"role": "assistant", "content": ""}))]
        return [event(self._chunk())] if self._script.fault != "empty" else []

    def _text(self, reasoning: bool) -> list[bytes]:
        text = "word " * self._script.per_chunk
        if self._style == "anthropic":
            delta = {"type": "thinking_delta", "thinking": text} if reasoning else {"type": "text_delta", "text": text}
            return [event({"type": "content_block_delta", "index": 0, "delta": delta})]
        if self._style == "chat":
            delta = {"reasoning_content": text} if reasoning else {"content": text}
            return [event(self._choice(delta=delta))]
        return [event(self._choice(text=text))]

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._style == "chat" else "text_completion"
        return {"id": self._id, "object": kind, "created": 1, "model": "mock", "choices": list(choices)}

    def _choice(self, **fields: Any) -> dict[str, Any]:
        return self._chunk({"index": 0, "finish_reason": None} | fields)

    def _prompt_tokens(self) -> int:
        words = len(prompt_text(self._body).split())
        return {"wrong_prompt": 10_000_000, "prompt_double": 2 * words}.get(self._script.fault, words) + 7

    def _end(self) -> None:
        script = self._script
        count = self._done * script.per_chunk
        output = {"usage_high": 1_000_000, "usage_more": count * 3 // 2, "usage_low": 1, "usage_negative": -5}.get(
            script.fault, count
        )
        if self._style == "anthropic":
            ends: list[dict[str, Any]] = [
                {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": output}},
                {"type": "message_stop"},
            ]
            self._transport.write(framed(b"".join(map(event, ends))) + b"0\r\n\r\n")
            return
        last: dict[str, Any] = {"delta": {}, "text": "", "finish_reason": "stop"}
        parts = [event(self._choice(**last))]
        if script.fault != "no_usage":
            usage = {
                "prompt_tokens": self._prompt_tokens(),
                "completion_tokens": output,
                "prompt_tokens_details": {"cached_tokens": script.cached},
            }
            if script.reasoning:
                usage["completion_tokens_details"] = {"reasoning_tokens": script.reasoning * script.per_chunk}
            parts.append(event(self._chunk() | {"usage": usage}))
        if script.fault != "no_done":
            parts.append(b"data: [DONE]\n\n")
        self._transport.write(framed(b"".join(parts)) + b"0\r\n\r\n")


def event(data: Mapping[str, Any]) -> bytes:
    name = f"event: {data['type']}\n".encode() if "type" in data else b""
    return name + b"data: " + json.dumps(data).encode() + b"\n\n"


def framed(data: bytes) -> bytes:
    """As one piece of a chunked body."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n" if data else b""


def whole(status: int, body: bytes) -> bytes:
    head = f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class MockServer:
    """The mock in a thread of this process. Use as a context manager; `url` is where it listens.

    `script` is one Script, or a function from a request's body to one. `requests` holds the bodies received.
    """

    def __init__(self, script: Script | Callable[[dict[str, Any]], Script]) -> None:
        self._choose = script if callable(script) else lambda _: script
        self.requests: list[dict[str, Any]] = []
        self.url = ""
        self._ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> MockServer:
        self._thread.start()
        self._loop, self._stop = self._ready.result(10)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        stop = asyncio.Event()
        async with serving(self._choose, self.requests) as port:
            self.url = f"http://127.0.0.1:{port}"
            self._ready.set_result((asyncio.get_running_loop(), stop))
            await stop.wait()


@asynccontextmanager
async def serving(
    script: Callable[[dict[str, Any]], Script], log: list[dict[str, Any]] | None = None
) -> AsyncIterator[int]:
    """Listens on a free loopback port, the value of the context."""
    with Pacer() as pacer:
        server = await asyncio.get_running_loop().create_server(
            lambda: MockConnection(script, pacer, log), "127.0.0.1", 0, backlog=4096
        )
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
