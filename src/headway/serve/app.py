"""The HTTP application: routes, and the gate every request passes first."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

import headway
from headway.core.errors import BadInput, HeadwayError
from headway.engine.ipc import Ready
from headway.serve.auth import Keys, check_host, header
from headway.serve.errors import ApiError, from_headway, from_msgspec
from headway.serve.generate import Generation, Job, chat_job, completion_job
from headway.serve.limits import BodyBudget, check_headers, check_json
from headway.serve.link import EngineLink
from headway.serve.metrics import CONTENT_TYPE, HttpDone, Metrics
from headway.serve.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from headway.serve.openapi import document
from headway.serve.sse import json_bytes
from headway.serve.text import PromptReader, Text

LIVENESS = "/health"  # the one route that needs no key
CLIENT_GONE = 499  # counted, never sent
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
log = logging.getLogger("headway.serve")
T = TypeVar("T")
Asked = TypeVar("Asked", ChatRequest, CompletionRequest)
Body = TypeVar("Body", ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)


class Phase(Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class Api:
    """The handlers and what they share.

    Args:
        model: the name clients use.
        created: when the server started, Unix seconds.
        stall_seconds: /health fails when the engine has work and no step ended for so long.

    Attributes:
        phase: what the server is doing; set by `lifecycle`.
        active: generating requests between body and last byte.
    """

    def __init__(
        self, link: EngineLink, metrics: Metrics, budget: BodyBudget, model: str, created: int, stall_seconds: float
    ) -> None:
        self._link = link
        self._metrics = metrics
        self._budget = budget
        self._created = created
        self._stall_seconds = stall_seconds
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="text")
        self._reader: PromptReader | None = None
        self._ready: Ready | None = None
        self._document = document()
        self._decoders: dict[type, Any] = {}
        self.model = model
        self.phase = Phase.LOADING
        self.active = 0

    def opened(self, text: Text, ready: Ready) -> None:
        """The model is loaded: accept requests."""
        self._reader = PromptReader(text, ready.max_model_len)
        self._ready = ready
        self.phase = Phase.READY

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{id:path}", self.one_model),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route(LIVENESS, self.health),
            Route("/ready", self.readiness),
            Route("/metrics", self.metrics),
            Route("/version", self.version),
            Route("/openapi.json", self.openapi),
        ]

    # Generating

    async def chat(self, request: Request) -> Response | Tracked:
        return await self._generate(request, ChatRequest, chat_job)

    async def completions(self, request: Request) -> Response | Tracked:
        return await self._generate(request, CompletionRequest, completion_job)

    async def _generate(
        self, request: Request, kind: type[Asked], make: Callable[[Asked, PromptReader, str, str], Job]
    ) -> Tracked:
        reader = self._accepting()
        tenant = request.scope["headway.tenant"]

        def prepare(body: Asked) -> Job:
            body.check()
            self._check_model(body.model)
            return make(body, reader, self.model, tenant)

        job = await self._parsed(request, kind, prepare)
        self._accepting()  # it may have begun to drain meanwhile
        return Tracked(self, Generation(self._link, job))

    def _accepting(self) -> PromptReader:
        """
        Raises:
            ApiError: 503, requests are not accepted now.
        """
        if self.phase is Phase.LOADING:
            raise ApiError(503, "the model is still being loaded", code="loading", retry_after=5)
        if self.phase is Phase.DRAINING:
            raise ApiError(503, "the server is shutting down", code="shutting_down", retry_after=10)
        if self.phase is Phase.DEAD or self._reader is None:
            raise ApiError(503, "the engine has stopped", code="engine_dead", retry_after=10)
        return self._reader

    def _check_model(self, model: str | None) -> None:
        if model is not None and model != self.model:
            raise ApiError(404, f"model: this server has {self.model!r} only", param="model", code="model_not_found")

    async def _parsed(self, request: Request, kind: type[Body], then: Callable[[Body], T]) -> T:
        """Read and decode the body and run `then` on it; everything but the reading in the thread pool.

        Raises:
            ApiError, HeadwayError: the body is at fault.
        """
        if kind not in self._decoders:
            self._decoders[kind] = msgspec.json.Decoder(kind)
        decoder = self._decoders[kind]

        def work(raw: bytes) -> T:
            check_json(raw)
            try:
                body = decoder.decode(raw)
            except msgspec.DecodeError as error:
                raise from_msgspec(error) from None
            except RecursionError:
                raise ApiError(400, "the body nests too deep", code="too_deep") from None
            return then(body)

        async with self._budget.read(request) as raw:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work, raw)

    # Text

    async def tokenize(self, request: Request) -> Response:
        reader = self._accepting()

        def work(body: TokenizeRequest) -> dict[str, Any]:
            self._check_model(body.model)
            if (body.prompt is None) == (body.messages is None):
                raise BadInput("prompt", "give either prompt or messages")
            if body.messages is not None:
                tokens = reader.chat(body.messages)
            else:
                tokens = reader.text_tokens(body.prompt or "", body.add_special_tokens is not False)
            return {"count": len(tokens), "max_model_len": reader.max_model_len, "tokens": tokens}

        return _json(await self._parsed(request, TokenizeRequest, work))

    async def detokenize(self, request: Request) -> Response:
        reader = self._accepting()

        def work(body: DetokenizeRequest) -> dict[str, Any]:
            self._check_model(body.model)
            reader.check_ids(body.tokens, "tokens")
            return {"prompt": reader.text.decode(body.tokens, skip_special=False)}

        return _json(await self._parsed(request, DetokenizeRequest, work))

    # About the server

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        self._check_model(request.path_params["id"])
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        model: dict[str, Any] = {"id": self.model, "object": "model", "created": self._created, "owned_by": "headway"}
        if self._ready is not None:
            context = self._ready.max_model_len
            meta = {"n_ctx_train": context, "n_ctx": context, "n_vocab": self._ready.vocab_size}
            model |= {"root": self._ready.model, "parent": None, "max_model_len": context, "meta": meta}
        return model

    async def health(self, request: Request) -> Response:
        """Whether the process lives and its engine steps on: read, never asked of the engine."""
        idle = self._link.idle_seconds()
        stuck = idle > self._stall_seconds
        good = self.phase in (Phase.READY, Phase.DRAINING) and not stuck and not self._link.dead
        body = {
            "status": "ok" if good else "stuck" if stuck else self.phase.value,
            "seconds_since_step": round(idle, 3),
        }
        return _json(body, 200 if good else 503)

    async def readiness(self, request: Request) -> Response:
        self._accepting()
        return _json({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        gauges = {
            "up": float(self.phase in (Phase.READY, Phase.DRAINING)),
            "seconds_since_step": self._link.idle_seconds(),
            "queue_requests": float(len(self._link.backlog)),
            "queue_prompt_tokens": float(self._link.backlog.tokens),
            "http_active": float(self.active),
            "step_times_are_estimates": float(self._ready is not None and self._ready.step_times == "estimate"),
        }
        return Response(self._metrics.render(self._link.status, gauges), media_type=CONTENT_TYPE)

    async def version(self, request: Request) -> Response:
        return _json({"version": headway.__version__})

    async def openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Tracked:
    """A generation that counts as active while it is answered."""

    def __init__(self, api: Api, generation: Generation) -> None:
        self._api = api
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._api.active += 1
        try:
            await self._generation(scope, receive, send)
        finally:
            self._api.active -= 1


class Gate:
    """The ASGI app: caps, host rule and key before any route; request id and OpenAI's error shape after.

    A failure after the first byte of an answer closes the connection: the client must not take it for complete.
    """

    def __init__(self, api: Api, keys: Keys) -> None:
        self._keys = keys
        self._fold = api._metrics.fold
        self._router = Router(api.routes(), redirect_slashes=False)
        self._paths = {route.path for route in api.routes()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served, not {scope['type']!r}")
        id = _request_id(scope)
        status = CLIENT_GONE

        async def reply(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", id)]
            await send(message)

        try:
            await self._guarded(scope, receive, reply)
        except ClientDisconnect:
            status = CLIENT_GONE
            return
        except Exception as error:
            if status != CLIENT_GONE:  # the answer has begun
                raise
            await self._answer(error, id)(scope, receive, reply)
        finally:
            self._fold(HttpDone(self._route(scope["path"]), status))

    async def _guarded(self, scope: Scope, receive: Receive, reply: Callable[[Message], Awaitable[None]]) -> None:
        headers = scope["headers"]
        check_headers(headers)
        check_host(headers, open_to_all=not self._keys)
        scope["headway.tenant"] = "" if scope["path"] == LIVENESS else self._keys.tenant(headers)
        scope["app"] = self  # makes Starlette's router raise HTTPException instead of answering in plain text
        await self._router(scope, receive, reply)

    def _answer(self, error: Exception, id: bytes) -> Response:
        if isinstance(error, HeadwayError):
            return from_headway(error).response()
        if isinstance(error, HTTPException):
            return ApiError(error.status_code, error.detail, headers=dict(error.headers or {})).response()
        log.exception("request %s failed", id.decode(), exc_info=error)
        return ApiError(500, f"internal error; the server's log has it under request {id.decode()}").response()

    def _route(self, path: str) -> str:
        """A label of few values."""
        if path in self._paths:
            return path
        return "/v1/models/{id}" if path.startswith("/v1/models/") else "other"


def _request_id(scope: Scope) -> bytes:
    given = header(scope["headers"], b"x-request-id")
    return given if given and _REQUEST_ID.fullmatch(given) else b"req-" + secrets.token_hex(12).encode()


def _json(value: object, status: int = 200) -> Response:
    headers = {"retry-after": "5"} if status == 503 else {}
    return Response(json_bytes(value), status, headers, "application/json")
