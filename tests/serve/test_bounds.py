"""What a request may make the server hold, build or wait for."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from starlette.requests import Request

from headway.serve import limits, text_pool
from headway.serve.errors import ApiError
from headway.serve.limits import BodyBudget
from headway.serve.text_pool import TextPool
from tests.serve.conftest import Server
from tests.serve.scripted import CONTEXT
from tests.serve.test_answers import CHAT, TEXT


def test_an_answer_that_could_be_too_large_is_refused_at_once(server: Server) -> None:
    body = {"prompt": "x" * 3000, "echo": True, "logprobs": 20, "n": 128, "max_tokens": 1}
    for stream in (False, True):
        begin = time.monotonic()
        refused = server.post(TEXT, {**body, "stream": stream})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "logprobs"
        assert time.monotonic() - begin < 2
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 20, "n": 128}
    assert "stream it" in server.post(CHAT, chat).json()["error"]["message"]
    assert server.post(CHAT, {**chat, "max_tokens": 2}).status_code == 200


def test_health_answers_while_a_large_answer_is_built(server: Server) -> None:
    body = {"prompt": "x" * 2000, "echo": True, "logprobs": 20, "n": 16, "max_tokens": 1}

    async def run() -> tuple[list[dict[str, Any]], float]:
        async with server.async_client() as client:
            tasks = [
                asyncio.create_task(client.post(TEXT, json={**body, "stream": stream})) for stream in (False, True)
            ]
            slowest = 0.0
            while not all(task.done() for task in tasks):
                begin = time.monotonic()
                await client.get("/health")
                slowest = max(slowest, time.monotonic() - begin)
                await asyncio.sleep(0.005)
            return [task.result() for task in tasks], slowest

    (whole, streamed), slowest = asyncio.run(run())
    assert slowest < 0.5, "8 s when it was built on the event loop"
    first, *_, last = whole.json()["choices"]
    assert len(first["logprobs"]["tokens"]) == 2001 and first["logprobs"]["text_offset"][-1] == 2000
    assert {**first, "index": 0, "text": ""} != {**last, "index": 0} and len(last["logprobs"]["top_logprobs"]) == 2001
    chunks = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line.startswith("data: {")]
    echoes = [chunk["choices"][0] for chunk in chunks if len(chunk["choices"][0]["text"]) == 2000]
    assert sorted(echo["index"] for echo in echoes) == list(range(16))
    assert all(echo["logprobs"]["tokens"] == first["logprobs"]["tokens"][:2000] for echo in echoes)


def test_detokenize_takes_what_a_context_holds(server: Server) -> None:
    assert server.post("/detokenize", {"tokens": [104] * CONTEXT}).status_code == 200
    refused = server.post("/detokenize", {"tokens": [104] * (CONTEXT + 1)})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tokens"


@pytest.mark.parametrize("field", ["name", "reasoning_content", "content"])
def test_every_text_of_a_message_counts(server: Server, field: str) -> None:
    message = {"role": "user", "content": "hi", field: "x" * 2_000_000}
    for path in (CHAT, "/tokenize"):
        refused = server.post(path, {"messages": [message]})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"


def test_short_work_does_not_wait_for_long_work_that_came_first() -> None:
    order: list[str] = []

    async def run() -> None:
        pool = TextPool()

        def work(name: str) -> None:
            time.sleep(0.02)
            order.append(name)

        tasks = [asyncio.create_task(pool.run(130_000, lambda: work("large"))) for _ in range(30)]
        await asyncio.sleep(0.01)
        tasks += [asyncio.create_task(pool.run(100, lambda: work("small"))) for _ in range(3)]
        await asyncio.gather(*tasks)
        pool.close()

    asyncio.run(run())
    assert order.count("large") == 30 and order[:8].count("small") == 3


def test_long_work_is_done_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under short work without end it waits for its age, not for ever."""
    monkeypatch.setattr(text_pool, "MOST_AGEING", 0.2)

    async def run() -> float:
        pool = TextPool()
        stop = asyncio.Event()

        async def short() -> None:
            while not stop.is_set():
                await pool.run(10, lambda: time.sleep(0.005))

        streams = [asyncio.create_task(short()) for _ in range(12)]
        await asyncio.sleep(0.05)
        begin = time.monotonic()
        await pool.run(1_000_000, lambda: None)
        waited = time.monotonic() - begin
        stop.set()
        await asyncio.gather(*streams)
        pool.close()
        return waited

    assert asyncio.run(run()) < 2


def test_too_much_waiting_work_is_refused_with_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_pool, "MAX_WAITING_BYTES", 1000)

    async def run() -> ApiError:
        pool = TextPool()
        tasks = [asyncio.create_task(pool.run(300, lambda: time.sleep(0.1))) for _ in range(6)]
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError) as caught:
            await pool.run(300, lambda: None)
        await asyncio.gather(*tasks)
        pool.close()
        return caught.value

    error = asyncio.run(run())
    assert error.status == 503 and error.retry_after and error.retry_after >= 1


def uploading(pieces: asyncio.Queue[bytes], peer: str = "a") -> Request:
    async def receive() -> dict[str, Any]:
        piece = await pieces.get()
        return {"type": "http.request", "body": piece, "more_body": True}

    return Request({"type": "http", "headers": [], "client": (peer, 1)}, receive)


def test_stalled_uploads_lock_nobody_out_and_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GRACE_SECONDS", 0.2)
    budget = BodyBudget(most=8 << 20, together=32 << 20)

    async def upload(size: int, peer: str, last: bool = False) -> int:
        pieces: asyncio.Queue[bytes] = asyncio.Queue()
        pieces.put_nowait(b"x" * size)
        request = uploading(pieces, peer)
        if last:
            whole = {"type": "http.request", "body": b"x" * size, "more_body": False}

            async def receive() -> dict[str, Any]:
                return whole

            request = Request({"type": "http", "headers": [], "client": (peer, 1)}, receive)
        try:
            async with budget.read(request) as body:
                return len(body)
        except ApiError as error:
            return error.status

    async def run() -> None:
        stalled = [asyncio.create_task(upload(8_000_000, "a")) for _ in range(32)]
        await asyncio.sleep(0.05)
        assert await upload(60_000, "a", last=True) == 60_000, "a small one always finds room"
        assert await upload(8_000_000, "b", last=True) == 8_000_000, "one peer has half of it at most"
        assert await upload(8_000_000, "a", last=True) == 503
        assert set(await asyncio.gather(*stalled)) == {408, 503}
        assert await upload(8_000_000, "a", last=True) == 8_000_000
        assert budget._held == 0 and not budget._by_peer

    asyncio.run(run())


def test_a_body_that_trickles_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GRACE_SECONDS", 0.2)

    async def run() -> float:
        pieces: asyncio.Queue[bytes] = asyncio.Queue()

        async def trickle() -> None:
            while True:
                pieces.put_nowait(b"x")
                await asyncio.sleep(0.02)

        task = asyncio.create_task(trickle())
        begin = time.monotonic()
        with pytest.raises(ApiError, match="too slowly"):
            async with BodyBudget().read(uploading(pieces)):
                pass
        task.cancel()
        return time.monotonic() - begin

    assert asyncio.run(run()) < 2
