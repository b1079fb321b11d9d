"""Prompts computed by one server and answered by another: as one server answers, and whatever fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from headway.core.errors import BadInput
from headway.routing.policies import routing_named
from headway.routing.pools import PrefillReplicas
from headway.routing.replica import per_token
from headway.routing.request import RoutedRequest
from headway.serve.route.fleet import pool_of
from headway.serve.route.prompts import PromptNames
from tests.serve.conftest import Server, write_tiny_checkpoint
from tests.serve.test_answers import TEXT

PROMPT = "the quick brown fox jumps over the lazy dog " * 26


def placed(tokens: int, cached: int = 0, splits: bool = True) -> RoutedRequest:
    return RoutedRequest("it", tokens, splits=splits, cached=cached)


def pool(names: tuple[str, ...] = ("p",), most: int | None = None) -> PrefillReplicas:
    made = PrefillReplicas(routing_named("least-loaded"), least=100, heartbeat=None)
    for name in names:
        made.router.join(name, per_token(1e-4), most=most)
    return made


@pytest.mark.parametrize(
    ("request_", "where"),
    [(placed(100), "p"), (placed(99), None), (placed(200, cached=101), None), (placed(200, splits=False), None)],
)  # fmt: skip
def test_who_computes_a_prompt(request_: RoutedRequest, where: str | None) -> None:
    chosen = pool().assign(request_, 0)
    assert (None if chosen is None else chosen.name) == where


def test_nobody_waits_for_room_in_the_prefill_pool() -> None:
    made = pool(most=1)
    first, second = RoutedRequest("a", 500, splits=True), RoutedRequest("b", 500, splits=True)
    assert made.assign(first, 0) is not None and made.assign(second, 0) is None
    made.computed("a", 1)
    assert made.assign(second, 1) is not None
    made.release("b", 2)
    made.release("b", 2)
    assert not made.router.live


def test_a_drained_or_dead_pool_computes_nothing() -> None:
    made = pool()
    made.router.drain("p")
    assert made.assign(placed(500), 0) is None
    assert pool(()).assign(placed(500), 0) is None


@pytest.mark.parametrize(
    ("path", "body", "splits"),
    [
        ("/v1/completions", b'{"prompt": "x"}', True), ("/v1/completions", b'{"prompt": [1, 2]}', True),
        ("/v1/completions", b'{"prompt": ["x", "y"]}', False), 
        ("/v1/completions", b'{"prompt": "x", "echo": true}', False),
        ("/v1/chat/completions", b'{"messages": []}', True), ("/v1/messages", b'{"messages": []}', True),
        ("/v1/embeddings", b'{"input": "x"}', False), ("/v1/responses", b'{"input": "x"}', False),
        ("/api/chat", b'{"messages": []}', True), 
        ("/v1/chat/completions", b'{"messages": [], "prompt_logprobs": 1}', False),
    ],
)  # fmt: skip
def test_which_requests_may_go_both_ways(path: str, body: bytes, splits: bool) -> None:
    assert PromptNames().request("it", body, "", "", None, True, path).splits is splits


@pytest.mark.parametrize(
    ("said", "pool"),
    [
        (b'{"status": "ready", "role": "prefill", "kv": "127.0.0.1:4711"}', ("prefill", "127.0.0.1:4711")),
        (b'{"status": "ready"}', ("both", "")), (b"ok", ("both", "")), (b'{"role": "king", "kv": "a:1"}', ("both", "")),
        (b'{"role": "prefill", "kv": "a b:1"}', ("both", "")), (b'{"role": "prefill", "kv": "x"}', ("both", "")),
        (b'{"role": "prefill", "kv": "' + b"h" * 300 + b':1"}', ("both", "")),
    ],
)  # fmt: skip
def test_what_a_replica_says_of_its_pool(said: bytes, pool: tuple[str, str]) -> None:
    assert pool_of(said) == pool


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(folder)
    return folder


def started(checkpoint: Path, *options: str) -> Server:
    command = [sys.executable, "-m", "headway", "serve", str(checkpoint), "--kv-cache-gib", "0.01", "--threads", "1"]
    return Server(command=[*command, "--port", "0", *options])


@pytest.fixture(scope="module")
def pools(checkpoint: Path) -> Iterator[Server]:
    server = started(checkpoint, "--prefill", "1", "--decode", "1")
    yield server
    server.kill()


def _roles(server: Server) -> dict[str, str]:
    told = httpx.get(server.url + "/replicas").json()
    return {one["role"]: one["replica"] for one in told["replicas"]}


def test_two_pools_answer_as_one_server(checkpoint: Path, pools: Server) -> None:
    one = started(checkpoint)
    try:
        for body in (
            {"prompt": PROMPT, "max_tokens": 8, "temperature": 0},
            {"prompt": "once more " + PROMPT, "max_tokens": 8, "temperature": 1.0, "seed": 5, "n": 2},
            {"prompt": "short", "max_tokens": 8, "temperature": 0},
        ):
            both = [server.post(TEXT, body).json() for server in (one, pools)]
            assert both[0]["choices"] == both[1]["choices"]
            cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in both]
            assert cached[0] == 0 and (cached[1] > 0) == (body["prompt"] != "short")  # computed by the other
        body = {"prompt": "! " + PROMPT, "max_tokens": 5, "stream": True, "temperature": 0}
        streamed = [server.post(TEXT, body).text for server in (one, pools)]
        assert streamed[0].count("data:") == streamed[1].count("data:") > 5
    finally:
        one.kill()
    metrics = pools.metrics()
    helped = {name: value for name, value in metrics.items() if name.startswith("headway:router_helped_total")}
    assert sum(helped.values()) == 3
    assert set(_roles(pools)) == {"prefill", "decode"}


def test_a_client_cannot_say_where_blocks_are(checkpoint: Path, pools: Server) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    header = {"x-headway-kv": "pull " + "a" * 32 + " 10.0.0.1:9 " + "b" * 32}
    assert pools.post(TEXT, body, headers=header).status_code == 200  # the router passes none of it on
    one = started(checkpoint)
    try:
        answer = one.post(TEXT, body, headers=header)
        assert answer.status_code == 400 and "x-headway-kv" in answer.text
    finally:
        one.kill()


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--role", "prefill"], "--kv-secret-file"), (["--prefill", "1"], "--decode"),
     (["--prefill", "1", "--decode", "1", "--replicas", "2"], "--replicas"),
     (["--kv-listen", "x"], "--kv-secret-file")],
)  # fmt: skip
def test_options_that_cannot_be(checkpoint: Path, options: list[str], said: str) -> None:
    command = [sys.executable, "-m", "headway", "serve", str(checkpoint), "--port", "0", *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == BadInput("x", "y").exit_code and said in ended.stderr


def test_answers_go_on_without_the_prefill_pool(checkpoint: Path) -> None:
    server = started(checkpoint, "--prefill", "1", "--decode", "1")
    try:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        before = server.post(TEXT, body).json()["choices"]
        for pid in _with(b"--role\0prefill", server.process.pid):
            os.kill(pid, signal.SIGKILL)
        for number in range(3):
            answer = server.post(TEXT, body | {"prompt": f"{number} {PROMPT}"})
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
        assert server.post(TEXT, body).json()["choices"] == before
    finally:
        server.kill()


def _with(words: bytes, parent: int) -> list[int]:
    """Children of a process whose command has these words."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line, stat = (entry / "cmdline").read_bytes(), (entry / "stat").read_text()
            except OSError:
                continue
            if words in line and int(stat.rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.name))
    return found
