"""`headway serve MODEL --replicas N`: one tree of processes, whose members are started again, and which ends as one."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from headway.core.errors import BadInput
from headway.core.options import Options
from headway.engine.options import EngineOptions
from headway.serve.options import ServeOptions
from headway.serve.route.own import serve_replicas
from tests.serve.conftest import Server, write_tiny_checkpoint

BODY = {"model": "tiny", "prompt": "once", "max_tokens": 4, "temperature": 0}


def tree(parent: int) -> list[int]:
    """All processes below one."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found += [int(stat.parent.name), *tree(int(stat.parent.name))]
    return found


def servers_of(server: Server) -> list[int]:
    """The replicas' own processes."""
    return [pid for pid in tree(server.process.pid) if b"--uds" in _command(pid)]


def until(what: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.1)


def up(server: Server) -> int:
    return sum(one["alive"] for one in httpx.get(server.url + "/replicas").json()["replicas"])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(folder)
    command = [sys.executable, "-m", "headway", "serve", str(folder), "--replicas", "2", "--port", "0", "--memory-gib",
               "2", "--served-model-name", "tiny", "--kv-cache-gib", "0.01", "--shutdown-timeout", "5",
               "--kv-disk", str(folder.parent / "kv"), "--kv-disk-gib", "0.2"]  # fmt: skip
    server = Server(command=command)
    yield server
    server.kill()


def test_replicas_come_back_and_go_together(two: Server) -> None:
    until(lambda: up(two) == 2)
    first = two.post("/v1/completions", BODY).json()["choices"][0]["text"]
    children = servers_of(two)
    assert len(children) == 2
    os.kill(children[0], signal.SIGKILL)
    for _ in range(4):
        assert two.post("/v1/completions", BODY).json()["choices"][0]["text"] == first
    until(lambda: any(pid not in children for pid in servers_of(two)))
    until(lambda: up(two) == 2)
    everybody = tree(two.process.pid)
    two.process.kill()
    two.process.wait()
    until(lambda: not any(Path(f"/proc/{pid}/cmdline").exists() and b"headway" in _command(pid) for pid in everybody))


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("options", "count", "field"),
    [({}, 0, "--replicas"), ({"event_log": "x"}, 2, "--event-log"), ({}, 1000, "--replicas")],
)
def test_what_several_cannot_have_is_refused(options: dict, count: int, field: str) -> None:
    with pytest.raises(BadInput, match=field):
        serve_replicas(EngineOptions(**options), ServeOptions(), [], count, print)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ServeOptions(), []),
        (ServeOptions(port=3, strict=True), ["--port", "3", "--strict"]),
        (ServeOptions(cors_origin=("a", "b")), ["--cors-origin", "a", "--cors-origin", "b"]),
        (ServeOptions(max_body_mib=0.5), ["--max-body-mib", "0.5"]),
    ],
)
def test_options_are_written_as_they_are_typed(options: Options, words: list[str]) -> None:
    assert options.words() == words
