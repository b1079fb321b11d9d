"""What operators set up: addresses, pages of other sites, logs."""

from __future__ import annotations

import json
import logging
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway.core.errors import BadInput
from headway.serve import logs
from headway.serve.hosted import Served
from headway.serve.lifecycle import run
from headway.serve.listening import bind, bind_path
from headway.serve.options import ServeOptions
from tests.serve.conftest import SERVER, Server
from tests.serve.scripted import ByteTokenizer
from tests.serve.test_answers import CHAT, TEXT

Start = Callable[..., Server]
PREFLIGHT = {
    "origin": "http://app.test",
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as raw:
            raw.bind(("::1", 0))
            return True
    except OSError:
        return False


@pytest.mark.parametrize("host", ["localhost", "127.0.0.2", "::1", "[::1]"])
def test_loopback_under_every_name(start: Start, host: str) -> None:
    """Reported t2-042."""
    if ":" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    server = start(host=host)
    (line,) = (line for line in server.lines if " at http" in line)
    url = re.search(r"http://\S+(?=/v1)", line)
    assert url is not None and httpx.get(url[0] + "/version").status_code == 200
    if host == "localhost" and has_ipv6():
        for address in ("127.0.0.1", "[::1]"):
            assert httpx.get(f"http://{address}:{server.port}/version").status_code == 200


@pytest.mark.parametrize("host", ["", "nonexistent.invalid"])
def test_addresses_that_are_none(host: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one")
    with pytest.raises(BadInput, match="--host"):
        run(ServeOptions(host=host, api_key_file=keys and str(keys)), [Served(model="m", load_text=ByteTokenizer)])


def test_without_ipv6_localhost_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported t2-042."""
    plain = socket.socket

    def none(family: int, *rest: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return plain(family, *rest)

    monkeypatch.setattr(socket, "socket", none)
    (sock,) = bind("localhost", 0)
    with sock, pytest.raises(BadInput, match="in use"):
        sock.listen()
        bind("127.0.0.1", sock.getsockname()[1])


@pytest.mark.parametrize("keys", [False, True])
def test_pages_of_a_named_origin_may_read(start: Start, tmp_path: Path, keys: bool) -> None:
    """Reported t2-043."""
    path = tmp_path / "keys"
    path.write_text("sk-one\n")
    server = start(cors_origin=["http://app.test"], **({"api_key_file": str(path)} if keys else {}))
    key = {"authorization": "Bearer sk-one"} if keys else {}
    page = {"origin": "http://app.test"}
    with server.client() as client:
        asked = client.options(CHAT, headers=PREFLIGHT)
        assert asked.status_code == 204 and not asked.content
        assert asked.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
        assert "POST" in asked.headers["access-control-allow-methods"]
        body: dict[str, Any] = {"prompt": "say:ok"}
        answers = [client.post(TEXT, json=body | {"stream": stream}, headers=page | key) for stream in (False, True)]
        answers += [client.post(TEXT, json={}, headers=page | key), client.get("/nowhere", headers=page | key), asked]
        if keys:
            answers.append(client.post(TEXT, json=body, headers=page))
            assert answers[-1].status_code == 401
        assert [answer.status_code for answer in answers[:4]] == [200, 200, 400, 404]
        for answer in answers:
            assert answer.headers["access-control-allow-origin"] == "http://app.test"
        foreign = {**PREFLIGHT, "origin": "http://evil.test"}
        for answer in (client.options(CHAT, headers=foreign), client.get("/version", headers=foreign | key)):
            assert "access-control-allow-origin" not in answer.headers
        assert client.options(CHAT, headers=foreign).status_code == (401 if keys else 403)
        assert "access-control-allow-origin" not in client.get("/version", headers=key).headers


def test_by_default_no_page_of_another_site_may_read(server: Server) -> None:
    """Reported t2-043."""
    with server.client() as client:
        refused = client.options(CHAT, headers=PREFLIGHT)
    assert refused.status_code == 403 and "--cors-origin" in refused.json()["error"]["message"]


def test_lines_of_one_kind_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    limit = logs.RateLimit()

    def line(number: int, name: str = "a") -> tuple[bool, str]:
        record = logging.LogRecord(name, logging.WARNING, "", 0, "refused: %d", (number,), None)
        return limit.filter(record), record.getMessage()

    assert sum(line(number)[0] for number in range(1000)) == logs.BURST
    assert line(1, "another")[0]
    assert all(line(number, logs.access.name)[0] for number in range(100))
    clock[0] = logs.WINDOW + 1
    assert line(7) == (True, f"refused: 7 ({1000 - logs.BURST} more like it were not logged)")
    assert line(8) == (True, "refused: 8")


ACCESS = """
import sys
from headway.serve import logs
logs.configure("info", sys.argv[1])
logs.log_access("::1", "POST", "/v1/a\\n", 200, 0.25, "req-1")
"""


@pytest.mark.parametrize("kind", logs.ACCESS)
def test_access_logs(kind: str) -> None:
    written = subprocess.run([sys.executable, "-c", ACCESS, kind], capture_output=True, text=True, check=True).stderr
    if kind == "json":
        line = json.loads(written)
        assert line.pop("time").startswith("20")
        assert line == {
            "peer": "::1", "method": "POST", "path": "/v1/a\n", "status": 200, "seconds": 0.25, "request_id": "req-1",
        }  # fmt: skip
    else:
        assert re.fullmatch(
            r"20\S+ \S+ INFO headway.access: ::1 POST '/v1/a\\n' 200 0.250s req-1\n" * (kind == "text"), written
        )


def test_garbage_does_not_fill_the_log(start: Start) -> None:
    server = start()
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(b"\x16\x03\x01garbage\r\n\r\n")
            raw.recv(1000)
    assert server.stop() == 0
    assert server.process.stdout is not None
    assert server.process.stdout.read().count("a connection is refused") <= 100


HELLO = {"messages": [{"role": "user", "content": "say:hello"}]}


def test_a_unix_socket_is_this_users_alone_and_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "headway.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))  # by a server that was killed
    command = [sys.executable, SERVER, json.dumps({"uds": str(path)})]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if "serving" in line)
            assert f"at unix:{path}/v1" in line
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            client = httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=30)
            assert client.post(CHAT, json=HELLO).status_code == 200
            with pytest.raises(BadInput, match="--uds: a server listens"):
                bind_path(path)
        finally:
            process.terminate()
    assert not path.exists()


def test_a_unix_socket_does_not_replace_a_file(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(BadInput, match="--uds: cannot listen"):
        bind_path(path)
    assert path.read_text() == "data"
    with pytest.raises(BadInput, match="--uds: cannot listen"):
        bind_path(tmp_path / ("x" * 200))


def test_a_proxys_path_is_taken_off(start: Start) -> None:
    server = start(root_path="/llm")
    for path in ("/llm/v1/models", "/v1/models", "//llm//v1/models/"):
        assert httpx.get(f"{server.url}{path}").status_code == 200, path
    for path in ("/llmx/v1/models", "/llm/llm/v1/models", "/llm/nothing"):
        assert httpx.get(f"{server.url}{path}").status_code == 404, path
    assert server.post(f"/llm{CHAT}", HELLO).status_code == 200


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "/a b", "/{x}"])
def test_a_proxys_path_that_is_none(path: str) -> None:
    with pytest.raises(BadInput, match="--root-path"):
        ServeOptions(root_path=path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_is_stopped_has_nothing_to_complain_of(number: int) -> None:
    command = [sys.executable, SERVER, json.dumps({})]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "try it" in line:
                break
        process.send_signal(number)
        rest = process.stdout.read()
    assert process.returncode == 0 and "Traceback" not in rest and "ERROR" not in rest, rest
