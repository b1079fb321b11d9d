"""The mock server with faults, and in all three APIs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from headway.bench import mock
from headway.bench.mock import event, framed, prompt_text, serving, whole

FAULTS = (
    "", "hang", "hang_mid", "drip", "half_close", "status_500", "status_429", "error_event", "bad_json", "not_http",
    "no_stream", "empty", "usage_high", "usage_low", "usage_negative", "no_usage", "no_done", "wrong_prompt",
    "usage_more", "prompt_double", "status_404",
)  # fmt: skip


@dataclass(frozen=True)
class Script(mock.Script):
    """How the mock answers.

    Attributes:
        reasoning: how many of the first chunks are reasoning.
        fault: what goes wrong, one of FAULTS; after `fault_after` chunks where it happens inside the stream.
        cached: prompt tokens reported as cached.
    """

    reasoning: int = 0
    fault: str = ""
    fault_after: int = 3
    cached: int = 0


class Stream(mock.MockStream[Script]):
    """One answer, as chat, completions or Anthropic messages, and what goes wrong with it."""

    @property
    def style(self) -> str:
        return "anthropic" if self.path.endswith(b"/messages") else "chat" if b"chat" in self.path else "completions"

    def begin(self) -> None:
        fault = self.script.fault
        if fault == "hang":
            return
        if fault in ("status_500", "status_429", "status_404"):
            self.transport.write(whole(int(fault[-3:]), b'{"error":{"message":"the mock refuses"}}'))
        elif fault == "not_http":
            self.transport.write(b"I am not a web server\r\n\r\n")
        elif fault == "no_stream":
            self.transport.write(whole(200, b'{"choices":[{"message":{"content":"hi"}}]}'))
        else:
            super().begin()

    def step(self) -> None:
        if self.script.fault == "empty":
            self.transport.write(framed(self.end()) + b"0\r\n\r\n")
            return
        super().step()

    def chunk(self) -> bool:
        if self.script.fault and self.done == self.script.fault_after and self._break():
            return False
        if self.done >= self.script.reasoning:
            return super().chunk()
        self.transport.write(framed(self._piece(True)))
        return True

    def _break(self) -> bool:
        fault = self.script.fault
        if fault == "half_close":
            self.transport.close()
        elif fault == "drip":
            self.transport.write(framed(b": keep-alive\n\n"))
            asyncio.get_running_loop().call_later(0.02, self._break_again)
        elif fault == "error_event":
            problem = {"type": "error", "error": {"message": "the engine died", "type": "server_error"}}
            self.transport.write(framed(event(problem)) + b"0\r\n\r\n")
        elif fault == "bad_json":
            self.transport.write(framed(b"data: {not json\n\n"))
        return fault in ("half_close", "drip", "error_event", "bad_json", "hang_mid")

    def _break_again(self) -> None:
        if not self.transport.is_closing():
            self._break()

    def opening(self) -> bytes:
        if self.style == "anthropic":
            usage = {"input_tokens": self.prompt_tokens() - self.script.cached, "output_tokens": 0}
            usage["cache_read_input_tokens"] = self.script.cached
            return event({"type": "message_start", "message": {"id": self.id, "usage": usage}})
        if self.style == "chat":
            return super().opening()
        return event(self.frame()) if self.script.fault != "empty" else b""

    def text(self) -> bytes:
        return self._piece(False)

    def _piece(self, reasoning: bool) -> bytes:
        text = "word " * self.script.per_chunk
        if self.style == "anthropic":
            delta = {"type": "thinking_delta", "thinking": text} if reasoning else {"type": "text_delta", "text": text}
            return event({"type": "content_block_delta", "index": 0, "delta": delta})
        if self.style == "chat":
            return event(self.choice(delta={"reasoning_content": text} if reasoning else {"content": text}))
        return event(self.choice(text=text))

    def end(self) -> bytes:
        if self.style == "anthropic":
            stop = {"stop_reason": "end_turn"}
            last = {"type": "message_delta", "delta": stop, "usage": {"output_tokens": self.output_tokens()}}
            return event(last) + event({"type": "message_stop"})
        usage = b"" if self.script.fault == "no_usage" else self.usage()
        done = b"" if self.script.fault == "no_done" else b"data: [DONE]\n\n"
        return event(self.choice(delta={}, text="", finish_reason="stop")) + usage + done

    def usage(self) -> bytes:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens(),
            "completion_tokens": self.output_tokens(),
            "prompt_tokens_details": {"cached_tokens": self.script.cached},
        }
        if self.script.reasoning:
            usage["completion_tokens_details"] = {"reasoning_tokens": self.script.reasoning * self.script.per_chunk}
        return event(self.frame() | {"usage": usage})

    def prompt_tokens(self) -> int:
        words = len(prompt_text(self.body).split())
        return {"wrong_prompt": 10_000_000, "prompt_double": 2 * words}.get(self.script.fault, words) + 7

    def output_tokens(self) -> int:
        count = super().output_tokens()
        told = {"usage_high": 1_000_000, "usage_more": count * 3 // 2, "usage_low": 1, "usage_negative": -5}
        return told.get(self.script.fault, count)

    def frame(self, *choices: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.style == "chat" else "text_completion"
        return super().frame(*choices) | {"object": kind}


class Connection(mock.MockConnection[Script]):
    stream = Stream


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
        def script(body: dict[str, Any]) -> Script:
            self.requests.append(body)
            return self._choose(body)

        stop = asyncio.Event()
        async with serving(script, Connection) as port:
            self.url = f"http://127.0.0.1:{port}"
            self._ready.set_result((asyncio.get_running_loop(), stop))
            await stop.wait()
