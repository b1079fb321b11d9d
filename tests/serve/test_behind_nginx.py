"""A server behind nginx, as the deployment page says: pieces arrive as they are made, and who leaves is noticed."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.serve.conftest import Server
from tests.test_deploy import block

NGINX = shutil.which("nginx")
CHAT = "/v1/chat/completions"
pytestmark = pytest.mark.skipif(NGINX is None, reason="no nginx here")


@pytest.fixture
def slow(start: Callable[..., Server]) -> Server:
    """Steps that take long enough to look at what happens between them."""
    return start(engine={"seconds": 0.03})


@pytest.fixture
def proxy(slow: Server, tmp_path: Path) -> Iterator[str]:
    """The address of an nginx with the page's site, without its certificate."""
    assert NGINX is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    site = re.sub(r"\n *ssl_\w+ [^;]*;", "", block("nginx")).replace("listen 443 ssl;", f"listen 127.0.0.1:{port};")
    site = site.replace("127.0.0.1:8000", f"127.0.0.1:{slow.port}")
    temps = "".join(
        f"{kind}_temp_path {tmp_path}/{kind}; " for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    conf = tmp_path / "nginx.conf"
    conf.write_text(
        f"daemon off; master_process off; pid {tmp_path}/pid; error_log stderr; "
        f"events {{}} http {{ access_log off; {temps} {site} }}"
    )
    running = subprocess.Popen([NGINX, "-p", tmp_path, "-c", conf], stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with socket.socket() as one:
                if not one.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        running.terminate()
        running.wait()


def test_pieces_are_sent_on_while_the_answer_is_made(slow: Server, proxy: str) -> None:
    body = {"messages": [{"role": "user", "content": "say:one two three"}], "stream": True}
    with (
        httpx.Client(base_url=proxy, headers={"Host": "127.0.0.1"}) as client,
        client.stream("POST", CHAT, json=body) as answer,
    ):
        lines = answer.iter_lines()
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        next(line for line in lines if '"content":"o' in line)
        assert slow.metrics()["headway:requests_running"] == 1, "the first piece came while others were to be made"
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_who_leaves_the_proxy_leaves_the_server(slow: Server, proxy: str) -> None:
    body = {"messages": [{"role": "user", "content": "count"}], "stream": True, "max_tokens": 2000}
    with (
        httpx.Client(base_url=proxy, headers={"Host": "127.0.0.1"}) as client,
        client.stream("POST", CHAT, json=body) as answer,
    ):
        next(line for line in answer.iter_lines() if '"content":"1' in line)
    slow.wait_idle(10)
