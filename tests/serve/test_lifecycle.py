"""Start, drain, and every way to end; nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway.engine.loop import MAX_FAILURES
from tests.serve.conftest import Server, events
from tests.serve.test_answers import CHAT, TEXT, ask

Start = Callable[..., Server]


def children(server: Server) -> list[int]:
    out = subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True).stdout
    return [int(line) for line in out.split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pids: list[int], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while any(map(alive, pids)):
        assert time.monotonic() < end, "an engine process was left behind"
        time.sleep(0.02)


class Background:
    """A request in a thread, and how it ended. Made, it is with the engine, or over already."""

    def __init__(self, server: Server, body: dict[str, Any], path: str = TEXT, wait: bool = True) -> None:
        self.response: httpx.Response | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(server, body, path))
        before = server.metrics()["headway:requests_total"]
        self._thread.start()
        while wait and self._thread.is_alive() and server.metrics()["headway:requests_total"] == before:
            time.sleep(0.02)

    def _run(self, server: Server, body: dict[str, Any], path: str) -> None:
        try:
            limit = {"max_tokens": 4000} if path == TEXT else {}
            self.response = server.post(path, {**limit, **body})
        except Exception as error:
            self.error = error

    def end(self, seconds: float = 20) -> httpx.Response:
        self._thread.join(seconds)
        assert self.response is not None, self.error
        return self.response


def test_a_signal_lets_running_requests_finish_and_refuses_new_ones(start: Start) -> None:
    server = start(engine={"seconds": 0.05})
    engine = children(server)
    running = [
        Background(server, {"prompt": "count", "max_tokens": 30}),
        Background(server, {"prompt": "count", "max_tokens": 30, "stream": True}),
    ]
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    late = server.post(TEXT, {"prompt": "late"})
    assert late.status_code == 503 and late.json()["error"]["code"] == "shutting_down"
    assert int(late.headers["retry-after"]) >= 1
    with server.client() as client:
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 503
    whole, streamed = (one.end() for one in running)
    assert whole.json()["usage"]["completion_tokens"] == 30
    assert len(events(streamed)) == 31
    assert server.process.wait(10) == 0
    wait_gone(engine)


def test_at_the_deadline_what_still_runs_ends_with_an_error(start: Start) -> None:
    server = start(engine={"seconds": 0.05}, shutdown_timeout=0.5)
    stream = Background(server, {"prompt": "count", "stream": True})
    whole = Background(server, {"prompt": "count"})
    begin = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - begin < 5
    assert events(stream.end())[-1]["error"]["code"] == "shutting_down"
    assert whole.end().status_code == 503


def test_a_second_signal_stops_at_once(start: Start) -> None:
    server = start(engine={"seconds": 0.05})
    engine = children(server)
    Background(server, {"prompt": "count"})
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    begin = time.monotonic()
    assert server.stop(signal.SIGINT) == 128 + signal.SIGINT
    assert time.monotonic() - begin < 2
    wait_gone(engine)


@pytest.mark.parametrize("how", ["killed", "exit"])
def test_when_the_engine_dies_streams_end_with_an_error_and_the_exit_code_is_not_0(start: Start, how: str) -> None:
    server = start(engine={"seconds": 0.02})
    stream = Background(server, {"prompt": "count", "stream": True})
    whole = Background(server, ask(CHAT, "count"), CHAT)
    if how == "killed":
        os.kill(children(server)[0], signal.SIGKILL)
    else:
        assert server.post(TEXT, {"prompt": "exit"}).status_code == 503
    with server.client() as client:
        while (health := client.get("/health")).status_code == 200:  # until the death is noticed
            time.sleep(0.005)
        assert health.status_code == 503 and health.json()["status"] == "dead"
        late = client.post(TEXT, json={"prompt": "late"})
        assert late.status_code == 503 and "retry-after" in late.headers
    assert events(stream.end())[-1]["error"]["code"] == "engine_dead"
    assert whole.end().status_code == 503
    assert server.process.wait(10) == 1


def test_when_the_server_is_killed_the_engine_goes_too_and_its_sockets(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = start(engine={"seconds": 0.02})
    engine = children(server)
    Background(server, {"prompt": "count"})
    server.process.kill()
    server.process.wait()
    wait_gone(engine)
    assert not list(tmp_path.glob("headway-*"))


def test_an_engine_that_cannot_start_gives_its_sentence_and_exit_code(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"model.gguf: tensor 'x' is cut off"):
        Server({"engine": {"broken": "model.gguf: tensor 'x' is cut off"}})


@pytest.mark.parametrize("stream", [False, True])
def test_a_row_that_fails_fails_alone(start: Start, stream: bool) -> None:
    server = start(engine={"seconds": 0.01})
    other = Background(server, {"prompt": "count", "max_tokens": 100})
    failed = server.post(TEXT, {"prompt": "fail", "stream": stream})
    if stream:
        assert events(failed)[-1]["error"]["message"] == "the request failed: a scripted failure"
    else:
        assert failed.status_code == 500
    assert other.end().status_code == 200
    server.wait_idle()


def test_a_step_that_throws_fails_its_rows_and_the_server_lives(start: Start) -> None:
    server = start()
    for _ in range(3):
        failed = server.post(TEXT, {"prompt": "throw"})
        assert failed.status_code == 500
        assert "scripted" not in failed.text, "no internals in an answer"
    assert server.post(TEXT, {"prompt": "say:ok"}).json()["choices"][0]["text"] == "ok"
    server.wait_idle()


def test_a_step_that_never_ends_is_seen_by_health(start: Start) -> None:
    server = start(stall_timeout=0.3)
    with pytest.raises(httpx.ReadTimeout), server.client() as client:
        client.post(TEXT, json={"prompt": "stall"}, timeout=0.6)
    Background(server, {"prompt": "say:ok"}, wait=False)
    time.sleep(0.8)
    with server.client() as client:
        health = client.get("/health")
    assert health.status_code == 503 and health.json()["status"] == "stuck"
    server.kill()


def test_an_executor_that_always_breaks_ends_the_server_and_a_poisoned_request_does_not(start: Start) -> None:
    server = start()
    for _ in range(2 * MAX_FAILURES):  # between two that work
        assert server.post(TEXT, {"prompt": "throw"}).status_code == 500
        assert server.post(TEXT, {"prompt": "say:ok"}).status_code == 200
    statuses = [server.post(TEXT, {"prompt": "throw"}).status_code for _ in range(MAX_FAILURES)]
    assert statuses == [500] * MAX_FAILURES
    assert server.process.wait(10) == 1
    assert server.process.stdout is not None
    output = server.process.stdout.read()
    assert f"the last {MAX_FAILURES} steps all failed" in output and "RuntimeError: a scripted fault" in output


def test_a_step_that_never_ends_ends_the_server_with_a_dump(start: Start) -> None:
    server = start(engine={"hang_seconds": 0.6})
    assert server.post(TEXT, {"prompt": "say:ok"}).status_code == 200
    time.sleep(1.0)
    assert server.post(TEXT, {"prompt": "say:ok"}).status_code == 200, "waiting is not hanging"
    assert server.post(TEXT, {"prompt": "stall"}).status_code == 503
    assert server.process.wait(10) == 1
    assert server.process.stdout is not None
    assert "in submit" in server.process.stdout.read(), "where every thread was"


def test_a_full_queue_is_answered_503_with_a_time_to_come_back(start: Start) -> None:
    server = start(engine={"seconds": 0.05, "max_rows": 1}, queue={"requests": 2})
    held = [Background(server, {"prompt": "count", "max_tokens": 10}) for _ in range(3)]
    full = server.post(TEXT, {"prompt": "one more"})
    assert full.status_code == 503
    assert full.json()["error"]["code"] == "queue_full"
    assert 1 <= int(full.headers["retry-after"]) <= 120
    assert {one.end().status_code for one in held} == {200}
    assert server.post(TEXT, {"prompt": "say:ok"}).status_code == 200
    assert server.post(TEXT, {"prompt": ["a", "b", "c"]}).status_code == 400, "more than the queue ever holds"


def test_what_waits_too_long_is_told_so(start: Start) -> None:
    server = start(engine={"seconds": 0.05, "max_rows": 1, "max_wait": 0.5})
    held = Background(server, {"prompt": "count", "max_tokens": 60})
    for stream in (False, True):
        late = server.post(TEXT, {"prompt": "late", "stream": stream})
        assert late.status_code == 503 and late.json()["error"]["code"] in ("queue_timeout", "queue_full")
        assert int(late.headers["retry-after"]) >= 1
    assert held.end().status_code == 200
    server.wait_idle()


def test_a_better_class_is_served_first_where_the_policy_has_classes(start: Start) -> None:
    server = start(engine={"seconds": 0.05, "max_rows": 1, "policy": "priority"})
    worse = Background(server, {"prompt": "count", "max_tokens": 40, "priority": 5})
    begin = time.monotonic()
    assert server.post(TEXT, {"prompt": "say:ok", "priority": -5}).status_code == 200
    better = time.monotonic() - begin
    assert worse.end().status_code == 200 and time.monotonic() - begin > better
    plain = start()
    refused = plain.post(TEXT, {"prompt": "say:ok", "priority": 1})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"
    assert "needs a server with --policy priority" in refused.json()["error"]["message"]
    assert plain.post(TEXT, {"prompt": "say:ok", "priority": 0}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_may_have_a_deadline(start: Start, stream: bool) -> None:
    server = start(engine={"seconds": 0.05})
    body = {"prompt": "count", "max_tokens": 1000, "stream": stream}
    begin = time.monotonic()
    late = server.post(TEXT, body, headers={"x-request-timeout": "0.5"})
    assert 0.4 < time.monotonic() - begin < 3
    error = events(late)[-1]["error"] if stream else late.json()["error"]
    assert error["code"] == "deadline_exceeded"
    assert stream or late.status_code == 503
    assert server.post(TEXT, {**body, "max_tokens": 2}, headers={"x-request-timeout": "30"}).status_code == 200
    for wrong in ("0", "-1", "inf", "nan", "1e400", "soon", ""):
        refused = server.post(TEXT, body, headers={"x-request-timeout": wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "x-request-timeout"
    server.wait_idle()


def test_prompt_tokens_that_wait_are_bounded_too(start: Start) -> None:
    server = start(engine={"seconds": 0.05, "max_rows": 1}, queue={"tokens": 1000})
    held = [Background(server, {"prompt": "count" + "x" * 700, "max_tokens": 15}) for _ in range(2)]
    assert server.post(TEXT, {"prompt": "x" * 700}).json()["error"]["code"] == "queue_full"
    assert server.post(TEXT, {"prompt": "x" * 1001}).status_code == 400
    assert {one.end().status_code for one in held} == {200}


def test_sockets_are_private_and_removed(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = start()
    (folder,) = tmp_path.glob("headway-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert server.stop() == 0
    assert not list(tmp_path.glob("headway-*"))
