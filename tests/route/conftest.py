"""Scripted servers, and routers before them: every one a process of its own, as users run them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Server

SLOW = {"engine": {"seconds": 0.02}}


class Routed:
    """A router before servers."""

    def __init__(self, servers: list[Server], *options: str) -> None:
        self.servers = servers
        replicas = [part for server in servers for part in ("--replica", server.url)]
        command = [sys.executable, "-m", "headway", "route", "--port", "0", *replicas, *options]
        self.router = Server(command=command)
        self.url = self.router.url
        self.wait(lambda about: all(one["alive"] for one in about))

    def about(self) -> list[dict[str, Any]]:
        return httpx.get(self.url + "/replicas", headers=self.headers).json()["replicas"]

    headers: dict[str, str] = {}  # noqa: RUF012

    def wait(self, what: Callable[[list[dict[str, Any]]], bool], seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not what(about := self.about()):
            assert time.monotonic() < end, about
            time.sleep(0.05)

    def holder(self) -> int:
        """Index of the only replica that has a request from this router."""
        self.wait(lambda about: sum(one["requests"] for one in about) == 1)
        return next(index for index, one in enumerate(self.about()) if one["requests"])


@pytest.fixture
def routed() -> Iterator[Callable[..., Routed]]:
    """Start a router before `count` servers of the same options."""
    made: list[Routed] = []
    servers: list[Server] = []

    def begin(count: int = 2, *options: str, server: dict[str, Any] | None = None) -> Routed:
        servers.extend(Server(dict(server or {})) for _ in range(count))
        made.append(Routed(servers[-count:], *options))
        return made[-1]

    yield begin
    for one in made:
        one.router.kill()
    for one in servers:
        one.kill()
