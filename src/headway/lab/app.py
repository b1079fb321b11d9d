"""The lab: pages on which what the planner, the simulator and the sampler compute can be moved by hand.

The pages draw; every number is computed here, by the functions that the verbs call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headway.core.errors import HeadwayError
from headway.lab import frontier, request, sampler, traffic
from headway.report.site import KIT, Site
from headway.roofline.hardware import hardware_catalogue
from headway.shape.catalogue import catalogue_ids

HOSTS = ["127.0.0.1", "localhost", "[::1]"]  # no other site's page can have a browser ask for it
Answer = Callable[[Any], dict[str, Any]]


def lab(runs: Path | None = None) -> Starlette:
    """The app. `runs`: a table of measured runs to lay over the frontier."""
    site = Site(Path(__file__).parent / "page", KIT)
    questions: dict[str, tuple[type[msgspec.Struct], Answer]] = {
        "request": (request.Request, request.answer),
        "sampler": (sampler.Sampling, sampler.answer),
        "frontier": (frontier.Frontier, partial(frontier.answer, runs=runs)),
        "traffic": (traffic.Traffic, traffic.answer),
    }

    async def file(asked: Request) -> Response:
        name = asked.path_params.get("name", "lab.html")
        if name not in site:
            raise HTTPException(404)
        return site.response(asked, name)

    async def answer(asked: Request) -> Response:
        name = asked.path_params["page"]
        if name not in questions:
            raise HTTPException(404)
        kind, function = questions[name]
        try:
            question = msgspec.convert(dict(asked.query_params), kind, strict=False)
            found = await run_in_threadpool(function, question)
        except (HeadwayError, msgspec.ValidationError) as error:
            return _json({"error": {"message": str(error)}}, 400)
        return _json(found)

    async def known(asked: Request) -> Response:
        return _json({"models": sorted(catalogue_ids()), "hardware": sorted(hardware_catalogue())})

    routes = [
        Route("/", file), Route("/ui/{name}", file), Route("/api/known", known), Route("/api/{page}", answer),
    ]  # fmt: skip
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS)])


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
