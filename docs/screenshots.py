"""Pictures of the pages for the docs: `python docs/screenshots.py`, with Playwright and a chromium installed.

Starts `headway serve` on the built-in model and `headway lab`, and writes docs/images/*.png.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from playwright.sync_api import Browser, Page, sync_playwright

IMAGES = Path(__file__).parent / "images"
QUESTION = "Explain what a KV cache is, in three short points."


@contextmanager
def running(*verb: str) -> Iterator[str]:
    """A verb of ours -> the address that it prints."""
    command = [sys.executable, "-m", "headway", *verb]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            found = re.search(r"(?:browser:|the lab is at) (http://\S+/)", line)
            if found:
                break
        else:
            raise SystemExit(f"headway {verb[0]} did not start")
        try:
            yield found.group(1)
        finally:
            process.terminate()


def page(browser: Browser, url: str, width: int = 1180, height: int = 760, dark: bool = False) -> Page:
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", device_scale_factor=1
    )
    opened = context.new_page()
    opened.goto(url)
    return opened


def chat(browser: Browser, url: str) -> None:
    shown = page(browser, url)
    shown.fill("#prompt", QUESTION)
    shown.press("#prompt", "Enter")
    shown.locator("[data-figure=tokens]").wait_for(timeout=120_000)
    shown.screenshot(path=IMAGES / "chat.png")


def live(browser: Browser, url: str) -> None:
    shown = page(browser, f"{url}ui/live.html", height=1000)
    bodies = [
        {"messages": [{"role": "user", "content": f"{QUESTION} {'Please. ' * n}"}], "max_tokens": 120} for n in range(8)
    ]
    asked = f"{url}v1/chat/completions"
    asking = [
        threading.Thread(target=httpx.post, args=(asked,), kwargs={"json": body, "timeout": 300}) for body in bodies
    ]
    for thread in asking:
        thread.start()
    shown.wait_for_timeout(8000)
    shown.screenshot(path=IMAGES / "live.png")
    for thread in asking:
        thread.join()


def lab(browser: Browser, url: str) -> None:
    for name, state in {"frontier": "?batch=64", "traffic": "?rate=12&policy=prefill-first&prompt=4000"}.items():
        shown = page(browser, f"{url}#{name}{state}")
        shown.locator("body[data-drawn]").wait_for(state="attached")
        shown.wait_for_timeout(2500)
        shown.screenshot(path=IMAGES / f"lab-{name}.png")


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        with running("serve", "--port", "0", "--price", "2") as address:
            chat(chromium, address)
            live(chromium, address)
        with running("lab", "--port", "0") as address:
            lab(chromium, address)
