"""Who may ask, and how much they may send."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from headway.core.errors import BadInput
from headway.serve import protocol
from headway.serve.auth import Key, Keys, is_loopback, read_keys
from headway.serve.errors import ApiError, clean
from headway.serve.hosted import Served
from headway.serve.lifecycle import run
from headway.serve.options import ServeOptions
from headway.serve.quotas import Quota
from tests.serve.conftest import Server
from tests.serve.scripted import ByteTokenizer
from tests.serve.test_answers import CHAT, TEXT

Start = Callable[..., Server]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> object:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("# two keys\nsk-one\n\nsk-two\n")
    server = Server({"api_key_file": str(path)})
    yield server
    server.kill()


ROUTES = [
    "/v1/models",
    "/v1/models/scripted",
    "/metrics",
    "/version",
    "/openapi.json",
    "/nowhere",
]


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_but_liveness_needs_a_key(guarded: Server, path: str) -> None:
    with guarded.client() as client:
        refused = client.get(path)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert client.get(path, headers={"authorization": "Bearer sk-wrong"}).status_code == 401
        assert client.get(path, headers={"authorization": "Bearer sk-two"}).status_code != 401
        assert client.get(path, headers={"x-api-key": "sk-one"}).status_code != 401
        assert [client.get(path).status_code for path in ("/health", "/health/", "/ready")] == [200] * 3


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
def test_posting_needs_a_key_before_the_body_is_looked_at(guarded: Server, path: str) -> None:
    assert guarded.post(path, "not even an object").status_code == 401


@pytest.mark.parametrize(
    "authorization", ["", "Bearer", "Basic sk-one", "bearer sk-one", "sk-one", "Bearer " + "k" * 9000]
)
def test_odd_authorization_headers(guarded: Server, authorization: str) -> None:
    with guarded.client() as client:
        status = client.get("/version", headers={"authorization": authorization}).status_code
    assert status == (200 if authorization.lower().strip() == "bearer sk-one" else 401)


@pytest.mark.parametrize(
    "target", ["/v1/../health", "//health", "/health?x=/health", "/%68ealth", "/health%2f..%2fversion"]
)
def test_the_path_cannot_be_dressed_up(guarded: Server, target: str) -> None:
    """Whatever is served without a key is liveness itself."""
    with socket.create_connection(("127.0.0.1", guarded.port)) as raw:
        raw.sendall(f"GET {target} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        answer = _read_all(raw)
    assert b" 401 " in answer.split(b"\r\n")[0] or b'"status":"ok"' in answer


def test_caches_are_apart_for_each_key(guarded: Server) -> None:
    body = {"prompt": "a secret that only one tenant has " * 4, "max_tokens": 1}

    def cached(key: str) -> int:
        with guarded.client() as client:
            answer = client.post(TEXT, json=body, headers={"x-api-key": key}).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("sk-one") == 0
    assert cached("sk-two") == 0
    assert cached("sk-one") > 0


def test_a_public_address_without_a_key_is_refused(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(BadInput, match="--api-key-file"):
            run(ServeOptions(host=host), [Served(model="m", load_text=ByteTokenizer)])
    assert all(map(is_loopback, ("localhost", "LOCALHOST", "127.9.9.9", "::1", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("localhost.evil.example", "::ffff:192.0.2.1", "::", "")))


@pytest.mark.parametrize("content", ["", "# only a comment\n", "two words\n", "k" * 600 + "\n", "schlüssel\n", None])
def test_a_key_file_without_usable_keys_is_refused(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadInput, match="--api-key-file"):
        read_keys(path)


def test_a_key_file_may_have_comments(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# all of them\nsk-one  # the laptop\n\n  # none\nsk#two\t#\n")
    assert [key.text for key in read_keys(path)] == ["sk-one", "sk#two"]


def test_a_key_may_have_limits_and_be_a_digest(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    digest = hashlib.sha256(b"sk-two").hexdigest()
    path.write_text(f"sk-one requests=60 concurrent=2  # the laptop\nsha256:{digest} input_tokens=1000\n")
    one, two = read_keys(path)
    assert one.quota == Quota(requests=60, concurrent=2)
    assert (two.text, two.digest.hex(), two.quota) == ("", digest, Quota(input_tokens=1000))
    keys = Keys([one, two])
    assert keys.quotas[keys.tenant([(b"x-api-key", b"sk-two")])] == two.quota
    with pytest.raises(ApiError):
        keys.tenant([(b"x-api-key", digest.encode())])


@pytest.mark.parametrize(
    "line",
    [
        "sk-one cache=",
        "sk-one cache=a cache=b",
        "sk-one cache=a/b",
        "sk-one requests",
        "sk-one requests=0",
        "sk-one requests=-1",
        "sk-one rate=3",
        "sk requests=1e3",
        "sha256:ab",
    ],
)
def test_a_line_of_a_key_file_that_is_none_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"sk-first\n{line}\n")
    with pytest.raises(BadInput, match=r"--api-key-file.*(no limit|64 hex digits|stands once)"):
        read_keys(path)


def test_keys_are_kept_as_digests() -> None:
    key = Key("secret", hashlib.sha256(b"secret").digest(), Quota())
    assert "secret" not in repr(vars(Keys([key])))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost:1"}, 200),
        ({"host": "127.0.0.1"}, 200),
        ({"host": "[::1]:80"}, 200),
        ({"host": "LOCALHOST:80"}, 200),
        ({"host": "[::ffff:127.0.0.1]"}, 200),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example?"}, 400),
        ({"host": "localhost/x"}, 400),
        ({"host": "a" * 300}, 400),
        ({"origin": "http://localhost:3000"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
    ],
    ids=str,
)
def test_without_keys_foreign_names_and_pages_are_refused(server: Server, headers: dict[str, str], status: int) -> None:
    with server.client() as client:
        assert client.get("/version", headers=headers).status_code == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "application/json; charset=utf-8"}, 200),
        ({"content-type": "APPLICATION/JSON"}, 200),
        ({}, 200),
        ({"content-type": "application/x-www-form-urlencoded"}, 200),  # as curl calls what it is given with -d
        ({"content-type": "application/x-www-form-urlencoded", "origin": "http://localhost"}, 415),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "multipart/form-data"}, 415),
        ({"content-encoding": "gzip"}, 415),
        ({"content-encoding": "identity"}, 200),
    ],
    ids=str,
)
def test_only_plain_json_is_read(server: Server, headers: dict[str, str], status: int) -> None:
    with server.client() as client:
        assert client.post(TEXT, content=b'{"prompt":"say:a"}', headers=headers).status_code == status
        asked = client.post("/api/generate", content=b'{"model":"tiny","prompt":"say:a"}', headers=headers)
        assert (asked.status_code == 415) == (status == 415)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[]", "invalid_type"),
        (b"null", "invalid_type"),
        (b'{"prompt":"a"} x', "invalid_json"),
        (b'{"prompt":"a","temperature":NaN}', "invalid_json"),
        (b'{"prompt":"a","temperature":Infinity}', "invalid_json"),
        (b'{"prompt":"a","temperature":1e999}', None),
        (b'{"prompt":"\xff"}', "invalid_json"),
        (b'{"prompt":' + b"[" * 50_000 + b"]" * 50_000 + b"}", "too_deep"),
        (b'{"x":' + b'{"a":' * 50 + b"1" + b"}" * 50 + b"}", "too_deep"),
        (b'{"prompt":"a","x":[' + b"[]," * 150_000 + b"1]}", "too_many_elements"),
        (b'{"prompt":[' + b"1," * 2_100_000 + b"1]}", "too_many_elements"),
        (b'{"prompt":"a","seed":' + b"1" * 5000 + b"}", "number_too_long"),
        (b'{"prompt":"a","seed":1' + b"0" * 60 + b"}", "invalid_value"),
        (b'"' + b'\\"' * 3_000_000, "invalid_json"),
        (b'{"prompt":"a","stop":[' + b'"a",' * 20 + b'"a"]}', "invalid_value"),
        (b'{"prompt":"a","stop":"' + b"x" * 2000 + b'"}', "invalid_value"),
        (b'{"prompt":"a","stop":""}', "invalid_value"),
        (b'{"prompt":"a","stop_token_ids":[' + b"1," * 300 + b"1]}", "invalid_value"),
        (b'{"prompt":[' + b'"a",' * 1100 + b'"a"]}', "invalid_value"),
        (b'{"prompt":["a","b","c","d","e","f","g","h","i"],"n":128}', "invalid_value"),
        (b'{"messages":[{"role":"user","content":"a"}]}', "invalid_value"),
    ],
    ids=lambda value: value[:30].decode("latin-1") if isinstance(value, bytes) else str(value),
)
def test_bodies_that_are_wrong_deep_or_many(server: Server, body: bytes, code: str | None) -> None:
    with server.client() as client:
        begin = time.monotonic()
        response = client.post(TEXT, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        assert code is None or response.json()["error"]["code"] == code, response.text
        assert time.monotonic() - begin < 2
        assert len(response.content) < 2000


def test_a_body_above_the_limit_is_refused_by_its_declared_length(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n")
        assert b" 413 " in raw.recv(4096)


def test_a_chunked_body_above_the_limit_is_refused_on_the_way(server: Server) -> None:
    def pieces() -> object:
        yield b'{"prompt":"'
        for _ in range(200):
            yield b"a" * 65536
        yield b'"}'

    with server.client() as client:
        response = client.post(TEXT, content=pieces(), headers={"content-type": "application/json"})
    assert response.status_code == 413


@pytest.mark.parametrize("count", [100, 2000])
def test_many_headers(server: Server, count: int) -> None:
    with server.client() as client:
        response = client.get("/version", headers={f"x-{number}": "y" for number in range(count)})
    assert response.status_code == 431


def test_a_header_without_end_is_cut_off(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.settimeout(5)
        sent = 0
        try:
            raw.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\nx-long: ")
            while sent < 8 << 20:
                sent += raw.send(b"a" * 65536)
        except OSError:
            pass
        assert sent < 8 << 20


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\n", b"POST / HTTP/1.1\r\ncontent-length: 9999\r\n\r\nrefused early"], ids=str
)
def test_who_does_not_finish_a_request_is_cut_off(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not help: the time is for the whole of it."""
    monkeypatch.setattr(protocol, "HEADER_SECONDS", 0.3)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def drip() -> float:
        config = uvicorn.Config(app, port=0, http=protocol.GuardedProtocol, lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        begin = time.monotonic()
        writer.write(sent)
        while not reader.at_eof() and time.monotonic() < begin + 3:
            with contextlib.suppress(TimeoutError, OSError):
                writer.write(b"x" if sent else b"")
                await asyncio.wait_for(reader.read(100), 0.05)
        writer.close()
        server.should_exit = True
        await serving
        return time.monotonic() - begin

    assert asyncio.run(drip()) < 2


def test_pipelined_requests_are_answered_in_order(server: Server) -> None:
    request = b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(request * 3 + b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        answer = _read_all(raw)
    assert answer.count(b'{"version"') == 3
    assert answer.rindex(b'"status"') > answer.rindex(b'"version"')


def test_a_pipelining_client_that_leaves_is_noticed(server: Server) -> None:
    body = json.dumps({"prompt": "count", "max_tokens": 4000, "ignore_eos": True, "n": 8}).encode()  # not done before
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    request = head + b"content-length: %d\r\n\r\n" % len(body) + body
    before = server.metrics()
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(request * 2)
        time.sleep(0.1)
    after = server.wait_idle()
    name = 'headway:requests_finished_total{finished_reason="abort"}'
    assert after[name] > before[name]


@pytest.mark.parametrize("method", ["OPTIONS", "PUT", "DELETE", "PATCH", "TRACE"])
def test_other_methods(server: Server, method: str) -> None:
    with server.client() as client:
        response = client.request(method, CHAT)
    assert response.status_code == 405
    assert "POST" in response.headers["allow"]
    assert response.json()["error"]["message"]


def test_head_and_http_1_0(server: Server) -> None:
    with server.client() as client:
        assert client.head("/health").status_code == 200
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(b"GET /version HTTP/1.0\r\n\r\n")
        assert b'"version"' in _read_all(raw)


def test_an_error_keeps_no_paths_addresses_or_control_characters() -> None:
    text = clean("open /home/me/models/x.gguf failed at 0x7f00deadbeef\x00\r\n\x1b[31m" + "y" * 5000)
    assert text.startswith("open (path) failed at (address) ")
    assert len(text) <= 1000 and text.isprintable()
    assert clean("see /v1/completions") == "see /v1/completions"


def test_503_always_says_when_to_come_back() -> None:
    assert ApiError(503, "full").response({}).headers["retry-after"] == "1"


def _read_all(raw: socket.socket) -> bytes:
    raw.settimeout(5)
    answer = b""
    while piece := raw.recv(65536):
        answer += piece
    return answer
