"""One generating HTTP request from its parsed body to its last byte, streaming or not.

body -> Job (thread pool) -> EngineLink.open -> Inbox -> deltas -> bytes
                                  ^-- a client that leaves, or an error, closes the inbox: the engine is told at once
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from headway.core.errors import HeadwayError
from headway.core.request import Finish, SamplingParams
from headway.engine.machine import wall_clock
from headway.engine.messages import Delta, Output, Refused, Submit
from headway.serve.errors import ApiError, from_headway
from headway.serve.link import EngineLink, Inbox
from headway.serve.openai import ChatRequest, CompletionRequest, check_rows, sampling_params
from headway.serve.shapes import ChatChoice, Choice, CompletionChoice, Echo, Header, Usage, usage_event
from headway.serve.sse import DONE, KEEP_ALIVE, event, json_bytes
from headway.serve.text import PromptReader, Text

HEAD_SECONDS = 2.0  # a stream's headers wait so long for the first output, so that a refusal still has its own status
KEEP_ALIVE_SECONDS = 15.0  # a silent stream says so, which keeps proxies from cutting it
STALL_SECONDS = 60.0  # a client that takes nothing for so long is given up
PULSE_SECONDS = 5.0  # how often silence and stalls are looked for

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
log = logging.getLogger("headway.serve")


@dataclass
class Job:
    """A generating request, ready for the engine.

    Attributes:
        submits: one per prompt.
        choices: by (submit id, choice).
        echoes: by submit id; None without echo.
        streams, wants_usage: how the client wants the answer.
    """

    header: Header
    submits: list[Submit]
    choices: dict[tuple[str, int], Choice]
    echoes: dict[str, Echo | None]
    streams: bool
    wants_usage: bool
    usage: Usage = field(default_factory=Usage)

    def take(self, outputs: Sequence[Output]) -> list[tuple[Choice, Delta]]:
        """Count what came, and say which choices gained something.

        Raises:
            ApiError: the engine refused a prompt, or a row failed.
        """
        gained = []
        for output in outputs:
            if isinstance(output, Refused):
                retry = 1 if output.status == 503 else None
                raise ApiError(output.status, output.message, code=output.code, retry_after=retry)
            if output.finish is not None and output.finish.reason not in ("stop", "length"):
                raise failure(output.finish)
            self.usage.completion += len(output.tokens)
            if output.choice == 0:
                self.usage.cached[output.id] = output.cached
            echo = self.echoes.get(output.id)
            if echo is not None:
                echo.logprobs += output.prompt_logprobs
            if output.tokens or output.text or output.finish is not None:
                gained.append((self.choices[output.id, output.choice], output))
        return gained

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        choices = sorted(self.choices.values(), key=lambda choice: choice.index)
        return {**self.header.body([choice.body() for choice in choices]), "usage": self.usage.body()}


def failure(finish: Finish) -> ApiError:
    """What a client is told about a request that ended neither by itself nor by its limit."""
    if finish.reason == "abort":
        return ApiError(503, "the server ended the request before it was complete", code="aborted", retry_after=1)
    log.error("a request failed: %s", finish.matched)
    return ApiError(500, f"the request failed: {finish.matched}", code="engine_error")


def chat_job(body: ChatRequest, reader: PromptReader, model: str, tenant: str) -> Job:
    """Runs in the thread pool.

    Raises:
        HeadwayError: the request is at fault.
    """
    arrival = wall_clock().now()  # queueing in the API process and tokenising are part of the wait
    params = sampling_params(body, reader.text.vocab_size)
    tokens = reader.chat(body.messages)
    room = reader.check_room(len(tokens), body.limit(), "messages")
    header = Header(f"chatcmpl-{secrets.token_hex(12)}", model, int(time.time()), "chat.completion")
    usage_field = body.streams and body.wants_usage

    def choice(index: int, _: Echo | None) -> Choice:
        return ChatChoice(header, reader.text, index, body.alternatives(), usage_field)

    return _job(header, arrival, [tokens], [room], [None], params, choice, tenant, body.streams, usage_field)


def completion_job(body: CompletionRequest, reader: PromptReader, model: str, tenant: str) -> Job:
    """Runs in the thread pool.

    Raises:
        HeadwayError: the request is at fault.
    """
    arrival = wall_clock().now()  # queueing in the API process and tokenising are part of the wait
    params = sampling_params(body, reader.text.vocab_size)
    prompts = body.prompts()
    check_rows(len(prompts), params.n)
    token_lists = [reader.prompt(prompt) for prompt in prompts]
    rooms = [reader.check_room(len(tokens), body.limit(), "prompt") for tokens in token_lists]
    header = Header(f"cmpl-{secrets.token_hex(12)}", model, int(time.time()), "text_completion")
    usage_field = body.streams and body.wants_usage
    alternatives = body.alternatives()
    echoes: list[Echo | None] = [None] * len(prompts)
    if body.echo:
        echoes = [_echo(prompt, ids, reader.text) for prompt, ids in zip(prompts, token_lists, strict=True)]

    def choice(index: int, echo: Echo | None) -> Choice:
        return CompletionChoice(header, reader.text, index, alternatives, usage_field, echo)

    return _job(header, arrival, token_lists, rooms, echoes, params, choice, tenant, body.streams, usage_field)


def _echo(prompt: str | list[int], tokens: tuple[int, ...], text: Text) -> Echo:
    if isinstance(prompt, str):
        return Echo(prompt, tokens, hidden=text.bos_id is not None and tokens[0] == text.bos_id)
    return Echo(text.decode(tokens, skip_special=False), tokens, hidden=False)


def _job(
    header: Header,
    arrival: int,
    prompts: Sequence[tuple[int, ...]],
    rooms: Sequence[int],
    echoes: Sequence[Echo | None],
    params: SamplingParams,
    choice: Callable[[int, Echo | None], Choice],
    tenant: str,
    streams: bool,
    wants_usage: bool,
) -> Job:
    submits = [
        Submit(
            id=f"{header.id}-{index}",
            tokens=tokens,
            params=replace(params, max_tokens=room),
            arrival=arrival,
            tenant=tenant,
        )
        for index, (tokens, room) in enumerate(zip(prompts, rooms, strict=True))
    ]
    choices = {
        (submit.id, number): choice(index * params.n + number, echo)
        for index, (submit, echo) in enumerate(zip(submits, echoes, strict=True))
        for number in range(params.n)
    }
    by_id = {submit.id: echo for submit, echo in zip(submits, echoes, strict=True)}
    usage = Usage(prompt=sum(map(len, prompts)))
    return Job(header, submits, choices, by_id, streams, wants_usage, usage)


class Generation:
    """An ASGI response: runs a job and answers it. Whatever ends it, the engine keeps nothing of it.

    While one piece of a stream waits for a slow client, the deltas of further turns gather in the inbox and go out as
    one piece: at most one answer is held.
    """

    def __init__(self, link: EngineLink, job: Job) -> None:
        self._link = link
        self._job = job
        self._inbox = Inbox(job.submits)
        self._sending = False
        self._sent = 0.0  # loop time at which the last piece had been taken

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._sent = task.get_loop().time()
        watcher = asyncio.create_task(self._watch(receive, task))
        try:
            await asyncio.sleep(0)  # the watcher looks first: whoever left during tokenising costs the engine nothing
            if self._inbox.client_gone:
                raise ClientDisconnect
            self._link.open(self._inbox)
            await (self._stream(send) if self._job.streams else self._whole(send))
        except asyncio.CancelledError:
            if not self._inbox.client_gone:
                raise
            task.uncancel()  # the watcher gave the client up
            raise ClientDisconnect from None
        finally:
            self._link.close(self._inbox)
            watcher.cancel()

    async def _watch(self, receive: Receive, task: asyncio.Task[Any]) -> None:
        """Notice a client that leaves (nobody else reads: it would pass unseen) or takes nothing; keep silence alive.

        One timer per request and pulse, instead of one per piece.
        """
        loop = task.get_loop()
        while True:
            try:
                async with asyncio.timeout(PULSE_SECONDS):
                    if (await receive())["type"] == "http.disconnect":
                        break
            except TimeoutError:
                quiet = loop.time() - self._sent
                if self._sending and quiet > STALL_SECONDS:
                    log.warning("a client took nothing for %.0f s; its request is cancelled", quiet)
                    self._inbox.client_gone = True
                    task.cancel()
                    return
                if quiet > KEEP_ALIVE_SECONDS:
                    self._inbox.wake()
        self._inbox.client_gone = True
        self._inbox.wake()

    async def _take(self) -> Sequence[tuple[Choice, Delta]]:
        outputs = await self._inbox.take()
        if self._inbox.client_gone:
            raise ClientDisconnect
        return self._job.take(outputs)

    async def _whole(self, send: Send) -> None:
        while self._inbox.pending or self._inbox.waiting:
            for choice, delta in await self._take():
                choice.add(delta)
        data = json_bytes(self._job.body())
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send(send, data, last=True)

    async def _stream(self, send: Send) -> None:
        data = b""
        with suppress(TimeoutError):  # nothing yet: open the stream, and let it be silent
            async with asyncio.timeout(HEAD_SECONDS):
                data = await self._chunks()
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            await self._send(send, data or KEEP_ALIVE)
            while self._inbox.pending or self._inbox.waiting:
                data = await self._chunks()
                if data:
                    await self._send(send, data)
                elif asyncio.get_running_loop().time() - self._sent > KEEP_ALIVE_SECONDS:
                    await self._send(send, KEEP_ALIVE)
            if self._job.wants_usage:
                await self._send(send, usage_event(self._job.header, self._job.usage))
        except HeadwayError as error:  # too late for a status: the stream's last event says it
            await self._send(send, event(from_headway(error).body()))
        await self._send(send, DONE, last=True)

    async def _chunks(self) -> bytes:
        return b"".join([choice.chunk(delta) for choice, delta in await self._take()])

    async def _send(self, send: Send, data: bytes, last: bool = False) -> None:
        self._sending = True
        await send({"type": "http.response.body", "body": data, "more_body": not last})
        self._sending = False
        self._sent = asyncio.get_running_loop().time()
