"""A real browser for tests of pages: Debian's chromium, driven by Playwright. Where there is none, they are skipped."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from headway.model.source import cache_folder

AXE = "4.14.1"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium is installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, url: str, path: str = "/", allowed: tuple[str, ...] = (), **options: Any) -> Iterator[Any]:
    """A page in a profile of its own. It must write nothing to the console, raise nothing, and ask no other host.

    Args:
        allowed: parts of console messages that are expected.
    """
    context = browser.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True, **options)
    context.set_default_timeout(10_000)
    page = context.new_page()
    complaints: list[str] = []
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    own = urlsplit(url).netloc

    def watch(request: Any) -> None:
        if urlsplit(request.url).scheme in ("http", "https") and urlsplit(request.url).netloc != own:
            complaints.append(f"asks another host: {request.url}")

    page.on("request", watch)
    page.goto(f"{url}{path}")
    yield page
    context.close()
    assert not [text for text in complaints if not any(part in text for part in allowed)]


def serious(page: Any) -> list[str]:
    """What axe-core finds of serious or critical issues; skips where it cannot be had."""
    page.evaluate(_axe())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{issue['id']}: {node['target']} {node['failureSummary']}"
        for issue in found["violations"]
        if issue["impact"] in ("serious", "critical")
        for node in issue["nodes"]
    ]


def _axe() -> str:
    folder = cache_folder() / "tests" / f"axe-core-{AXE}"
    script = folder / "node_modules" / "axe-core" / "axe.min.js"
    if not script.is_file():
        if not shutil.which("npm"):
            pytest.skip("npm is not here")
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--silent", "--ignore-scripts", "--prefix", str(folder), f"axe-core@{AXE}"]
        if subprocess.run(command, capture_output=True, timeout=300, check=False).returncode:
            pytest.skip("axe-core is not to be had here")
    return script.read_text()
