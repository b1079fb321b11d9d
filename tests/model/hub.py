"""A server on the loopback interface that speaks a Hugging Face hub's routes for files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """What it serves, and what it was asked for.

    Attributes:
        repos: repository -> file -> bytes.
        gated: repositories that want the token "secret".
        asked: (method, path, Range) of each request.
        cut: file -> bytes after which its connection breaks, once.
        sizes: file -> bytes that it is said to have, where that is a lie.
        drips: files of which, after half, a byte comes now and then.
        slow_api: what is asked about repositories is answered by a byte now and then.
        endless: files whose body does not end.
        circles: every file is somewhere else, for ever.
        endpoint: its address.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.asked: list[tuple[str, str, str | None]] = []
        self.cut: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        self.drips: set[str] = set()
        self.slow_api = False
        self.endless: set[str] = set()
        self.circles = False
        self.endpoint = ""

    def fetched(self) -> list[str]:
        """Files that were asked for, in order."""
        return [path.rpartition("/")[2] for method, path, _ in self.asked if method == "GET" and "/resolve/" in path]


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    over = Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(b"")

        def do_GET(self) -> None:
            self._answer(None)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, body: bytes | None) -> None:
            hub.asked.append((self.command, self.path, self.headers.get("Range")))
            parts = self.path.partition("?")[0].strip("/").split("/")
            api = parts[:2] == ["api", "models"]
            repo = "/".join(parts[2:4] if api else parts[:2])
            if repo not in hub.repos:
                return self._refuse(404, "RepoNotFound")
            if repo in hub.gated and self.headers.get("Authorization") != "Bearer secret":
                return self._refuse(403 if api else 401, "GatedRepo")
            revision = parts[5] if api else parts[3]
            if revision not in ("main", "v1", COMMIT):
                return self._refuse(404, "RevisionNotFound")
            if api:
                sizes = {name: len(data) for name, data in hub.repos[repo].items()} | hub.sizes
                files = [{"rfilename": name, "size": size} for name, size in sizes.items()]
                answer = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": files, "private": False, "tags": []}
                if hub.slow_api:
                    return self._drip(json.dumps(answer).encode(), {}, 0)
                return self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})
            if hub.circles:
                return self._send(302, b"", {"Location": self.path})
            name = "/".join(parts[4:])
            data = hub.repos[repo].get(name)
            if data is None:
                return self._refuse(404, "EntryNotFound")
            if name in hub.endless and self.command == "GET":
                return self._flood()
            start = int((self.headers.get("Range") or "bytes=0-")[6:].split("-")[0])
            end = len(data) if self.command == "HEAD" else hub.cut.pop(name, len(data))
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
            if start:
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            if name in hub.drips and self.command == "GET":
                return self._drip(data, headers, len(data) // 2)
            self._send(206 if start else 200, data[start:], headers, end - start)

        def _drip(self, data: bytes, headers: dict[str, str], half: int) -> None:
            """Send a file to its half, then a byte now and then, until the client has had enough or the test has."""
            self._send(200, data, headers, half)
            with suppress(OSError):
                for byte in data[half:-1]:
                    self.wfile.write(bytes([byte]))
                    if over.wait(0.05):
                        break

        def _flood(self) -> None:
            self.send_response(200)
            self.end_headers()  # no length: the end of the connection would be the end of the file
            self.close_connection = True
            with suppress(OSError):  # until the client has had enough
                while True:
                    self.wfile.write(bytes(1 << 20))

        def _refuse(self, status: int, code: str) -> None:
            self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

        def _send(self, status: int, body: bytes, headers: dict[str, str], most: int | None = None) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[:most])
                self.close_connection = most is not None and most < len(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()
