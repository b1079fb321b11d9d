"""One generation against a client and an engine that do exactly as told: silence, stalls, and leaving early."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from headway.core.request import Finish, SamplingParams
from headway.engine.messages import Delta, Refusal
from headway.serve import generate
from headway.serve.answer import Answer, Message, Query
from headway.serve.dialects.openai.format import ChatFormat
from headway.serve.errors import ApiError
from headway.serve.generate import Generation
from headway.serve.link import Inbox
from headway.serve.quotas import Quota, Quotas
from headway.serve.text import PromptReader
from headway.serve.text_pool import TextPool
from tests.serve.scripted import ByteTokenizer

Asgi = dict[str, Any]


class Link:
    """Notes what was opened and closed; `play` puts outputs into the inbox."""

    def __init__(self) -> None:
        self.opened: list[Inbox] = []
        self.closed: list[Inbox] = []

    def open(self, inbox: Inbox) -> None:
        self.opened.append(inbox)

    def close(self, inbox: Inbox) -> None:
        self.closed.append(inbox)

    def play(self, *outputs: Delta | Refusal) -> None:
        for output in outputs:
            self.opened[0].put(output)
        self.opened[0].wake()


class Http:
    """A client: `leave` closes its connection, `block` stops reading."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self.messages: list[Asgi] = []

    async def receive(self) -> Asgi:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Asgi) -> None:
        await self.reading.wait()
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


LEASE = Quotas(Quota()).admit("", 1)


def answer(stream: bool) -> Answer:
    query = Query(
        messages=[Message("user", "a")], params=SamplingParams(), stream=stream, field="messages", model="m",
        id_prefix="",
        format=partial(ChatFormat, ByteTokenizer(), None, False, None),
    )  # fmt: skip
    return PromptReader(ByteTokenizer(), 100, SamplingParams()).answer(query, "", 0)


def play(
    scene: Callable[[Link, Http, Answer, asyncio.Task[None]], Awaitable[None]], stream: bool = True
) -> tuple[Link, Http]:
    async def run() -> tuple[Link, Http]:
        link, client, work = Link(), Http(), answer(stream)
        generation = Generation(link, TextPool(), work, LEASE)  # type: ignore[arg-type]
        task = asyncio.create_task(generation({}, client.receive, client.send))
        async with asyncio.timeout(5):
            await asyncio.sleep(0.01)
            await scene(link, client, work, task)
        return link, client

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("HEAD", 0.05), ("KEEP_ALIVE", 0.05), ("PULSE", 0.02)):
        monkeypatch.setattr(generate, f"{name}_SECONDS", seconds)


def delta(work: Answer, text: str, finish: str | None = None) -> Delta:
    return Delta(work.submits[0].id, 0, 0, (1,), text, finish=Finish(finish) if finish else None)


def test_a_silent_stream_opens_and_says_so_now_and_then() -> None:
    async def scene(link: Link, client: Http, work: Answer, task: asyncio.Task[None]) -> None:
        await asyncio.sleep(0.3)
        assert client.messages[0]["status"] == 200
        link.play(delta(work, "hi"))
        await asyncio.sleep(0.1)
        link.play(delta(work, "", "stop"))
        await task

    link, client = play(scene)
    assert client.body.startswith(ChatFormat.keep_alive * 2)
    assert client.body.count(ChatFormat.keep_alive) <= 8
    assert b'"content":"hi"' in client.body and client.body.endswith(b"data: [DONE]\n\n")
    assert link.closed == link.opened


@pytest.mark.parametrize("stream", [False, True])
def test_who_left_before_the_engine_was_asked_costs_it_nothing(stream: bool) -> None:
    """Reported t2-024."""

    async def run() -> Link:
        link, client = Link(), Http()
        client.gone.set()
        with pytest.raises(ClientDisconnect):
            await Generation(link, TextPool(), answer(stream), LEASE)({}, client.receive, client.send)  # type: ignore[arg-type]
        return link

    assert asyncio.run(run()).opened == []


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_is_noticed_without_a_further_output(stream: bool) -> None:
    async def scene(link: Link, client: Http, work: Answer, task: asyncio.Task[None]) -> None:
        link.play(delta(work, "hi"))
        await asyncio.sleep(0.01)
        client.gone.set()
        with pytest.raises(ClientDisconnect):
            await task

    link, _ = play(scene, stream)
    assert link.closed == link.opened != []


def test_who_is_slow_gets_everything_in_larger_pieces() -> None:
    async def scene(link: Link, client: Http, work: Answer, task: asyncio.Task[None]) -> None:
        link.play(delta(work, "0"))
        await asyncio.sleep(0.01)
        client.reading.clear()
        for number in range(1, 20):
            link.play(delta(work, f"{number},"))
            await asyncio.sleep(0.001)
        client.reading.set()
        link.play(delta(work, "", "length"))
        await task

    _, client = play(scene)
    assert all(f'"content":"{number},"'.encode() in client.body for number in range(1, 20))
    assert len(client.messages) <= 6


def test_a_refusal_before_the_first_byte_has_its_own_status() -> None:
    async def scene(link: Link, client: Http, work: Answer, task: asyncio.Task[None]) -> None:
        link.play(Refusal(work.submits[0].id, "the queue is full", "queue_full", 503))
        with pytest.raises(ApiError) as caught:
            await task
        assert caught.value.status == 503 and caught.value.retry_after

    _, client = play(scene)
    assert client.messages == []


def test_an_error_after_the_first_byte_is_the_last_event() -> None:
    async def scene(link: Link, client: Http, work: Answer, task: asyncio.Task[None]) -> None:
        link.play(delta(work, "hi"))
        await asyncio.sleep(0.01)
        link.play(delta(work, "", "error"))
        await task

    _, client = play(scene)
    assert b'data: {"error":{"message":"the request failed' in client.body
    assert client.body.endswith(b"data: [DONE]\n\n")
