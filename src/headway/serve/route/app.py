"""The router's routes: a few of its own, and all others passed on."""

from __future__ import annotations

from contextlib import AsyncExitStack

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

import headway
from headway.client.upstream import UpstreamError
from headway.core.clock import to_ps
from headway.core.errors import BadInput
from headway.serve.answer import DEADLINE_HEADER
from headway.serve.app import deadline_of
from headway.serve.auth import header
from headway.serve.encode import json_bytes
from headway.serve.errors import ApiError, from_msgspec
from headway.serve.limits import BodyBudget, check_json
from headway.serve.metrics import CONTENT_TYPE, ServerMetrics, render
from headway.serve.quotas import Quotas
from headway.serve.route.fleet import ReplicaFleet
from headway.serve.route.passage import HOP, OURS, Passage, forwarded
from headway.serve.route.prompts import SESSION_HEADER, PromptNames

OF_ONE = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # change one replica: to be asked of each


class Drain(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /replicas/drain."""

    replica: str
    draining: bool = True


class RouterApi:
    """Handlers.

    Args:
        share_cache: replicas share cached prefixes among keys.
        quotas: what each key may ask of all replicas together.
    """

    def __init__(
        self, fleet: ReplicaFleet, metrics: ServerMetrics, budget: BodyBudget, share_cache: bool, quotas: Quotas
    ) -> None:
        self._quotas = quotas
        self._fleet, self._metrics, self._budget, self._share = fleet, metrics, budget, share_cache
        self._names = PromptNames()
        self._count = 0
        self.draining = False

    def routes(self) -> list[Route]:
        return [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
            Route("/version", self.version),
            Route("/replicas", self.replicas),
            Route("/replicas/drain", self.drain, methods=["POST"]),
            Route("/{path:path}", self.get, methods=["GET", "HEAD", "DELETE"]),
            Route("/{path:path}", self.post, methods=["POST"]),
        ]

    # About itself

    async def health(self, request: Request) -> Response:
        """Whether this process lives; how its replicas are /ready says."""
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        self._check_open()
        return _json({"status": "ready"})

    def _check_open(self) -> None:
        """
        Raises:
            ApiError: no requests are accepted now.
        """
        if self.draining:
            raise ApiError(503, "the router is stopping", code="shutting_down", retry_after=10)
        if not self._fleet.up:
            raise ApiError(503, "no replica is up", code="no_replica", retry_after=5)

    async def metrics(self, request: Request) -> Response:
        return Response(render([*self._metrics.series(), *self._fleet.series()]), media_type=CONTENT_TYPE)

    async def version(self, request: Request) -> Response:
        return _json({"version": headway.__version__})

    async def replicas(self, request: Request) -> Response:
        return _json({"replicas": self._fleet.about(), "waiting": self._fleet.router.waiting})

    async def drain(self, request: Request) -> Response:
        """Send a replica nothing more, or something again."""
        async with self._budget.read(request) as raw:
            try:
                asked = msgspec.json.decode(raw, type=Drain)
            except msgspec.DecodeError as error:
                raise from_msgspec(error) from None
        self._fleet.drain(asked.replica, asked.draining)
        return await self.replicas(request)

    # Passed on

    async def post(self, request: Request) -> ASGIApp:
        self._check_open()
        scope = request.scope
        if scope["path"] in OF_ONE:
            raise ApiError(400, "this changes one replica: ask each of them", code="unsupported")
        headers = scope["headers"]
        deadline = deadline_of(request.headers.get(DEADLINE_HEADER))
        until = None if deadline is None else self._fleet.now() + to_ps(deadline)
        held = AsyncExitStack()
        try:
            body = await held.enter_async_context(self._budget.read(request))
            check_json(body)
            self._count += 1
            session = (header(headers, SESSION_HEADER) or b"").decode("latin-1")
            reads = self._fleet.router.policy.reads_blocks
            namespace = "" if self._share else scope["headway.namespace"]
            routed = self._names.request(f"r{self._count}", body, namespace, session, until, reads, scope["path"])
            target, passed = _target(request), forwarded(headers, scope["headway.request_id"])
            lease = self._quotas.admit(scope["headway.tenant"], 0, generates=False)
        except BaseException:
            await held.aclose()
            raise
        return Passage(self._fleet, routed, b"POST", target, passed, body, held, lease)

    async def get(self, request: Request) -> Response:
        """What any replica knows (/v1/models, the page) is asked of one that lives, else of the next one."""
        headers = forwarded(request.scope["headers"], request.scope["headway.request_id"])
        problem = "no replica can be reached"
        for member in self._fleet.others():
            try:
                answer = await member.upstream.ask(request.method.encode(), _target(request), headers)
                try:
                    body = b"".join([piece async for piece in answer.pieces()])
                finally:
                    member.upstream.release(answer)
            except UpstreamError as error:
                problem = str(error)
                continue
            kept = {n.decode("latin-1"): v.decode("latin-1") for n, v in answer.headers if n not in HOP | OURS}
            return Response(body, answer.status, kept)
        raise ApiError(503, problem, code="no_replica", retry_after=5)


def _target(request: Request) -> bytes:
    """Path and query, as they are passed on."""
    query = request.scope["query_string"]
    raw = request.scope["path"].encode()
    if any(byte <= 32 or byte >= 127 for byte in raw):
        raise BadInput("path", "it has characters that no route has")
    return raw + (b"?" + query if query else b"")


def _json(value: object) -> Response:
    return Response(json_bytes(value), media_type="application/json")
