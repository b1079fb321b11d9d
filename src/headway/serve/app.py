"""The HTTP application: routes, and the gate every request passes first."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import headway
from headway.core.errors import BadInput, HeadwayError, shown
from headway.core.grammar import Grammar
from headway.engine.ipc import Explained
from headway.engine.machine import wall_clock
from headway.engine.messages import TRANSFER_HEADER, Explain
from headway.serve.answer import DEADLINE_HEADER, Answer, Query
from headway.serve.auth import Keys, check_host, header
from headway.serve.cors import Cors
from headway.serve.decode import decoded, ignored_header
from headway.serve.dialect import AdapterChange, CacheQuestion, Counted, Endpoint
from headway.serve.dialects import DIALECTS, dialect_of
from headway.serve.encode import json_bytes
from headway.serve.errors import ApiError, from_headway
from headway.serve.generate import Generation
from headway.serve.hosted import HostedModel, Phase
from headway.serve.limits import BodyBudget
from headway.serve.logs import log_access
from headway.serve.metrics import CONTENT_TYPE, HttpDone, ServerMetrics, render
from headway.serve.openapi import document
from headway.serve.pages import FILES, Pages
from headway.serve.quotas import Quota, Quotas
from headway.serve.receipts import RECEIPT_HEADER, itemised
from headway.serve.store import Conversations
from headway.serve.text import PromptReader
from headway.serve.text_pool import TextPool
from headway.serve.tracing import Tracer

OPEN = ("/", "/health", "/ready")  # need no key, nor do the page's files
CLIENT_GONE = 499  # counted, never sent
_SLASHES = re.compile("//+")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
MAX_DEADLINE = 1e6  # seconds
MOST_CHECKED = 4  # grammars of a key that wait to be compiled at once
log = logging.getLogger("headway.serve")
T = TypeVar("T")


class Api:
    """The handlers and what they share.

    Args:
        models: one or more; requests name theirs.
        metrics: of the server itself.
        created: when the server started, Unix seconds.
        stall_seconds: /health fails when an engine has work and no step ended for so long.
        lora_folder: where LoRA adapters may be loaded from on request; None = nowhere.
        price: dollars per hour of the machine, which the models share in equal parts; for receipts.
        quotas: what each key may use; None = as much as it likes.
        strict: fields of bodies that are not known are refused, not left out.
        tracer: writes a span per generating request; None = there are none.
    """

    def __init__(
        self,
        models: Sequence[HostedModel],
        metrics: ServerMetrics,
        budget: BodyBudget,
        created: int,
        stall_seconds: float,
        lora_folder: Path | None = None,
        price: float | None = None,
        quotas: Quotas | None = None,
        strict: bool = False,
        tracer: Tracer | None = None,
    ) -> None:
        self.models = models
        self._strict = strict
        self._tracer = tracer
        self._metrics = metrics
        self._budget = budget
        self._stall_seconds = stall_seconds
        self._quotas = quotas or Quotas(Quota())
        self._price = None if price is None else price / len(models)
        self._pool = TextPool()
        self._grammars = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._checking: Counter[str] = Counter()  # grammars, by key
        self._document = document()
        self._pages = Pages(self.find, self._price)
        self.created = created
        self.lora_folder = lora_folder
        self.conversations = Conversations()

    def routes(self) -> list[Route]:
        return [
            *[self._route(endpoint) for dialect in DIALECTS for endpoint in dialect.endpoints],
            *self._pages.routes(),
            Route("/health", self.health),
            Route("/ready", self.readiness),
            Route("/metrics", self.metrics),
            Route("/version", self.version),
            Route("/openapi.json", self.openapi),
        ]

    # Routes of the dialects

    def _route(self, endpoint: Endpoint) -> Route:
        if endpoint.body is None:

            async def get(request: Request) -> Response:
                return _json(endpoint.answer(request.path_params, _Caller(self, request.scope["headway.tenant"])))

            return Route(endpoint.path, get)
        decoder = msgspec.json.Decoder(endpoint.body)

        async def post(request: Request) -> ASGIApp:
            return await self._post(request, endpoint, decoder)

        return Route(endpoint.path, post, methods=["POST"])

    async def _post(self, request: Request, endpoint: Endpoint, decoder: msgspec.json.Decoder[Any]) -> ASGIApp:
        self._check_open()
        tenant, namespace = request.scope["headway.tenant"], request.scope["headway.namespace"]
        deadline = deadline_of(request.headers.get(DEADLINE_HEADER))
        headers: list[tuple[bytes, bytes]] = []

        def work() -> Answer | AdapterChange | CacheQuestion | Counted:
            body, left_out = decoded(raw, decoder, self._strict)
            headers.extend(ignored_header(left_out))
            value = endpoint.answer(body, _Caller(self, tenant))
            if isinstance(value, Query):
                return self._named(value.model).reader.answer(value, tenant, arrival, deadline, namespace)
            if isinstance(value, AdapterChange | CacheQuestion):
                return value
            read = value if isinstance(value, Counted) else Counted(value, 0)
            return Counted(json_bytes(read.value), read.tokens)

        async with self._budget.read(request) as raw:
            arrival = wall_clock().now()  # waiting for a thread and tokenising are part of a request's wait
            value = await self._pool.run(len(raw), work)
        if isinstance(value, Answer) and (way := request.headers.get(TRANSFER_HEADER)) is not None:
            value.send_by(way)
        if isinstance(value, Answer) and request.headers.get(RECEIPT_HEADER) == "1":
            value.itemise = partial(itemised, price=self._price)
        if isinstance(value, Answer) and self._tracer is not None:
            about = request.scope["headers"], request.scope["headway.request_id"]
            value.ended = partial(self._tracer.write, value, *about)
        if isinstance(value, AdapterChange):
            await self._named(value.model).link.ask(value.command)
            return _json(value.answer())
        if isinstance(value, Answer):
            return await self._generation(value, tenant, deadline, headers)
        tokens = len(value.tokens) if isinstance(value, CacheQuestion) else value.tokens
        lease = self._quotas.admit(tenant, tokens, generates=False)
        lease.close(0)
        headers += lease.headers
        if isinstance(value, CacheQuestion):
            question = Explain(secrets.token_hex(8), value.tokens, namespace, value.adapter)
            found = await self._named(value.model).link.ask(question)
            assert isinstance(found, Explained) and found.explanation is not None
            said = partial(value.answer, found.explanation)
            content = json_bytes(await self._pool.run(len(raw), said))
        else:
            content = value.value
        return Response(content, headers=_texts(headers), media_type="application/json")

    async def _generation(
        self, value: Answer, tenant: str, deadline: float | None, headers: list[tuple[bytes, bytes]]
    ) -> Generation:
        """Let a request in, its grammar compiled.

        Raises:
            HeadwayError: its key has used up a limit, or no model accepts requests now.
        """
        model = self._named(value.query.model)
        generates = value.query.params.pooling is None
        lease = self._quotas.admit(tenant, value.prompt_tokens, generates, value.query.field)
        try:
            if value.query.params.grammar is not None:
                grammar, field = value.query.params.grammar, value.query.grammar_field
                async with asyncio.timeout(deadline):
                    value.bind(await self._compiled(model.reader, grammar, field, tenant))
            _ = model.reader  # it may have begun to drain meanwhile
        except TimeoutError:
            lease.close(0)
            raise ApiError(503, "the grammar was not compiled in time", code="deadline_exceeded") from None
        except BaseException:
            lease.close(0)
            raise
        return Generation(model.link, self._pool, value, lease, headers)

    async def _compiled(self, reader: PromptReader, grammar: Grammar, field: str, tenant: str) -> Grammar:
        """As `GrammarChecker.check`; one that takes long holds up others that were not checked before, and no more.

        Raises:
            ApiError: 429, others of this key wait to be checked.
        """
        known = reader.grammars.known(grammar, field)
        if known is not None:
            return known
        if self._checking[tenant] >= MOST_CHECKED:
            problem = f"{field}: {MOST_CHECKED} grammars of this key are being compiled; send this one again"
            raise ApiError(429, problem, param=field, code="rate_limit_exceeded", retry_after=2)
        self._checking[tenant] += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._grammars, reader.grammars.check, grammar, field
            )
        finally:
            self._checking[tenant] -= 1

    def _check_open(self) -> None:
        """
        Raises:
            ApiError: 503, no model accepts requests now, whichever a body will name.
        """
        if all(model.phase is not Phase.READY for model in self.models):
            _ = min(self.models, key=_badness).reader

    def _named(self, name: str) -> HostedModel:
        return next(model for model in self.models if model.name == name)

    def find(self, name: str | None) -> tuple[HostedModel, str]:
        if name is None and len(self.models) == 1:
            return self.models[0], ""
        for model in self.models:
            if name == model.name:
                return model, ""
        for model in self.models:
            if name is not None and name in model.adapters:
                return model, name
        for model in self.models:
            if name in model.also:
                return model, ""
        names = [name for model in self.models for name in (model.name, *model.adapters)]
        has = f"{names[0]!r} only" if len(names) == 1 else ", ".join(map(repr, names))
        if name is None:
            raise ApiError(400, f"model: say which; this server has {has}", param="model", code="missing_field")
        raise ApiError(404, f"model: this server has {has}", param="model", code="model_not_found")

    # About the server

    async def health(self, request: Request) -> Response:
        """Whether the process lives and its engines step on: read, never asked of an engine. It fails as soon as one of
        several engines does: whoever watches the server is to start it anew, though the other models go on."""
        idle = max(model.link.idle_seconds() for model in self.models)
        stuck = idle > self._stall_seconds
        phase = max(self.models, key=_badness).current_phase
        good = phase in (Phase.READY, Phase.DRAINING) and not stuck
        status = "ok" if good else "stuck" if stuck else phase.value
        body = {"status": status, "seconds_since_step": round(idle, 3)}
        return _json(body, 200 if good else 503)

    async def readiness(self, request: Request) -> Response:
        """Whether every model that has an engine accepts requests."""
        living = [model for model in self.models if model.phase is not Phase.DEAD]
        for model in living or self.models:
            _ = model.reader
        said = [model.ready for model in self.models if model.ready is not None]
        pool = {"role": said[0].role, "kv": said[0].kv_address} if len(said) == 1 else {}
        return _json({"status": "ready", **pool})

    async def metrics(self, request: Request) -> Response:
        series = [*self._metrics.series(), *(one for model in self.models for one in model.series())]
        return Response(render(series), media_type=CONTENT_TYPE)

    async def version(self, request: Request) -> Response:
        return _json({"version": headway.__version__})

    async def openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    def close(self) -> None:
        self._pool.close()
        self._grammars.shutdown(wait=False, cancel_futures=True)
        if self._tracer is not None:
            self._tracer.close()


def _badness(model: HostedModel) -> int:
    return list(Phase).index(model.current_phase)


def _texts(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in headers}


def deadline_of(given: str | None) -> float | None:
    """Seconds of an x-request-timeout header."""
    try:
        seconds = None if given is None else float(given)
    except ValueError:
        seconds = math.nan
    if seconds is not None and not 0 < seconds <= MAX_DEADLINE:
        raise BadInput(DEADLINE_HEADER, f"{shown(given)} is not a number of seconds above 0 and up to {MAX_DEADLINE:g}")
    return seconds


class _Caller:
    """The server as one key sees it: a `Host` to the dialects."""

    def __init__(self, api: Api, tenant: str) -> None:
        self.models, self.created, self.lora_folder = api.models, api.created, api.lora_folder
        self.find = api.find
        self.conversations = api.conversations.of(tenant)


class Gate:
    """The ASGI app: caps, host rule and key before any route; request id and the dialect's error shape after.

    A failure after the first byte of an answer closes the connection: the client must not take it for complete.
    """

    def __init__(
        self, routes: Sequence[Route], fold: Callable[[HttpDone], None], keys: Keys, cors: Cors, root: str = ""
    ) -> None:
        self._root = root
        self._keys = keys
        self._cors = cors
        self._fold = fold
        self._router = Router(routes, redirect_slashes=False)
        self._labels = {path.partition("{")[0]: path.replace(":path}", "}") for path in (r.path for r in routes)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"only HTTP is served, not {scope['type']!r}")
        id = _request_id(scope)
        begin = time.perf_counter()
        scope["headway.request_id"] = id.decode()
        origin = self._cors.allowed(scope["headers"])
        path = _SLASHES.sub("/", scope["path"]).rstrip("/")  # as bases that end in "/" make them
        if self._root and (path + "/").startswith(self._root + "/"):
            path = path[len(self._root) :]
        scope["path"] = path or "/"
        named = dialect_of(scope["path"]).id_header
        ids = [(name, id) for name in (b"x-request-id", named) if name]
        extra = [*ids, *(self._cors.headers(origin) if origin else ())]
        status = CLIENT_GONE

        async def reply(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        try:
            preflight = self._cors.preflight(scope["method"], scope["headers"]) if origin else None
            if preflight is not None:
                await reply({"type": "http.response.start", "status": 204, "headers": preflight})
                await reply({"type": "http.response.body"})
                return
            await self._guarded(scope, receive, reply, origin is not None)
        except ClientDisconnect:
            status = CLIENT_GONE
            return
        except Exception as error:
            if status != CLIENT_GONE:  # the answer has begun
                raise
            dialect = dialect_of(scope["path"])
            failed = _as_api_error(error, id, dialect.names)
            await failed.response(dialect.error(failed))(scope, receive, reply)
        finally:
            self._fold(HttpDone(self._label(scope["path"]), status))
            peer = scope["client"][0] if scope.get("client") else ""
            log_access(peer, scope["method"], scope["path"], status, time.perf_counter() - begin, id.decode())

    async def _guarded(
        self, scope: Scope, receive: Receive, reply: Callable[[Message], Awaitable[None]], trusted_origin: bool
    ) -> None:
        headers = scope["headers"]
        check_host(headers, open_to_all=not self._keys, trusted_origin=trusted_origin)
        is_open = scope["path"] in OPEN or scope["path"].startswith(FILES)
        tenant = scope["headway.tenant"] = "" if is_open else self._keys.tenant(headers)
        scope["headway.namespace"] = self._keys.namespace(tenant)
        scope["app"] = self  # makes Starlette's router raise HTTPException instead of answering in plain text
        await self._router(scope, receive, reply)

    def _label(self, path: str) -> str:
        """A route's path as a label of few values."""
        start = path if path in self._labels else path[: path.rfind("/") + 1]
        return self._labels.get(start, "other")


def _as_api_error(error: Exception, id: bytes, names: Mapping[str, str]) -> ApiError:
    if isinstance(error, HeadwayError):
        return from_headway(error, names)
    if isinstance(error, HTTPException):
        if error.status_code == 404:
            return ApiError(404, "no such route; GET /openapi.json lists them", code="not_found")
        return ApiError(error.status_code, error.detail, headers=dict(error.headers or {}))
    log.exception("request %s failed", id.decode(), exc_info=error)
    return ApiError(500, f"internal error; the server's log has it under request {id.decode()}")


def _request_id(scope: Scope) -> bytes:
    given = header(scope["headers"], b"x-request-id")
    return given if given and _REQUEST_ID.fullmatch(given) else b"req-" + secrets.token_hex(12).encode()


def _json(value: object, status: int = 200) -> Response:
    headers = {"retry-after": "5"} if status == 503 else {}
    return Response(json_bytes(value), status, headers, "application/json")
