"""Routes for people: the pages, their files, and what the live one shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from headway.report.site import KIT, Site
from headway.serve.encode import json_bytes
from headway.serve.hosted import HostedModel
from headway.serve.live import Eye, LiveStream, Watcher

FILES = "/ui/"


class Pages:
    """
    Args:
        find: (the model that a request names, the adapter over it).
        price: dollars per hour of the machine that a model pays; None = nobody said.
    """

    def __init__(self, find: Callable[[str | None], tuple[HostedModel, str]], price: float | None) -> None:
        self._find = find
        self._price = price
        self._site = Site(Path(__file__).parent / "page", KIT)
        self._eyes: dict[str, Eye] = {}

    def routes(self) -> list[Route]:
        return [Route("/", self.root), Route(f"{FILES}{{name}}", self.file), Route("/v1/live", self.live)]

    async def root(self, request: Request) -> Response:
        """The chat page, for browsers; a line for clients of Ollama, which look here whether a server is there."""
        if "text/html" not in request.headers.get("accept", ""):
            return Response("Headway is running; GET /openapi.json lists its routes\n", media_type="text/plain")
        asked = request.scope["raw_path"].decode("latin-1")
        if not asked.endswith("/"):  # a proxy's path: what the page names lies below it
            return RedirectResponse(f"{asked}/")
        return self._site.response(request, "index.html")

    async def file(self, request: Request) -> Response:
        """A page, or a file of one."""
        name = request.path_params["name"]
        if name not in self._site:
            raise HTTPException(404)
        return self._site.response(request, name)

    async def live(self, request: Request) -> ASGIApp:
        """What an engine holds now, or, for those who accept server-sent events, from now on."""
        model, _ = self._find(request.query_params.get("model"))
        _ = model.reader  # it serves
        tenant = request.scope["headway.tenant"]
        eye = self._eyes.setdefault(model.name, Eye(model))
        if "text/event-stream" in request.headers.get("accept", ""):
            return LiveStream(eye, tenant, self._price)
        sample = Watcher(model, tenant, self._price).take(await eye.look())
        return Response(json_bytes(sample), media_type="application/json")
