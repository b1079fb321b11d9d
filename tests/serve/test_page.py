"""The chat page in a real browser: every control, and figures that are the API's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import headway
from headway.report.site import POLICY
from tests.browser import chromium, opened, serious
from tests.serve.conftest import Server, events

HOSTILE = (
    "# Title\n\n<img src=x onerror=alert(1)> <script>alert(2)</script> [bad](javascript:alert(3)) "
    "![pic](http://192.0.2.1/x.png) **bold** `a < b` &lt;kept&gt;\n\n```js\n</code><b>x</b>\n```\n\n- one\n- two"
)


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    server = Server({"price": 3.6})
    yield server
    server.kill()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, served: Server) -> Iterator[Any]:
    with opened(browser, served.url) as page:
        yield page


def ask(page: Any, text: str) -> dict[str, Any]:
    """Send a message, wait for the end of the answer -> what was sent, and the usage that the API told."""
    with page.expect_response("**/v1/chat/completions") as caught:
        page.fill("#prompt", text)
        page.press("#prompt", "Enter")
    return told(page, caught.value)


def told(page: Any, response: Any) -> dict[str, Any]:
    response.finished()
    page.wait_for_selector("#send")
    blocks = [block.removeprefix("data: ") for block in response.text().split("\n\n") if block.startswith("data: {")]
    usage = next(chunk["usage"] for chunk in map(json.loads, reversed(blocks)) if chunk.get("usage"))
    return {"body": response.request.post_data_json, "usage": usage}


def answers(page: Any) -> list[str]:
    return page.locator(".assistant .said, .assistant .tokens").all_inner_texts()


def figure(page: Any, name: str) -> str:
    return page.locator(f"[data-figure={name}]").last.inner_text()


def test_browsers_get_the_page_and_other_clients_a_line(served: Server) -> None:
    shown = httpx.get(served.url, headers={"accept": "text/html,*/*"})
    assert shown.headers["content-type"].startswith("text/html")
    assert shown.headers["content-security-policy"] == POLICY and "unsafe" not in POLICY
    assert "running" in httpx.get(served.url).text
    script = httpx.get(f"{served.url}/ui/chat.js")
    again = httpx.get(f"{served.url}/ui/chat.js", headers={"if-none-match": script.headers["etag"]})
    assert script.headers["content-type"].startswith("text/javascript") and again.status_code == 304
    for path in ("/ui/nothing.js", "/ui/..%2fapp.py", "/ui/LICENSES", "/ui/"):
        assert httpx.get(served.url + path).status_code == 404


def test_the_page_is_small() -> None:
    root = Path(headway.__file__).parent
    files = [path for folder in ("serve/page", "report/kit") for path in (root / folder).iterdir()]
    assert sum(path.stat().st_size for path in files) < 400_000


def test_a_proxys_path_leads_to_the_page(browser: Any) -> None:
    server = Server({"root_path": "/llm"})
    try:
        with opened(browser, server.url, "/llm") as page:
            assert ask(page, "say:hi")["usage"]["completion_tokens"] == 3
    finally:
        server.kill()


def test_figures_under_an_answer_are_those_of_the_api(page: Any) -> None:
    told = ask(page, "say:Hello")
    usage = told["usage"]
    assert answers(page) == ["Hello"]
    assert figure(page, "tokens") == f"{usage['completion_tokens']} tokens"
    assert figure(page, "prompt").startswith(f"{usage['prompt_tokens']} prompt")
    assert float(figure(page, "cost")[1:]) == pytest.approx(usage["receipt"]["dollars"], rel=0.06)
    assert re.fullmatch(r"TTFT [\d.]+ m?s", figure(page, "ttft"))
    assert re.fullmatch(r"[\d.]+ (µs|ms|s)/token", figure(page, "tpot"))
    page.click(".bill summary")
    assert str(usage["receipt"]["computed_tokens"]) in page.locator(".bill").inner_text()


def test_what_a_model_says_is_never_markup(page: Any) -> None:
    page.on("dialog", lambda dialog: pytest.fail("a script ran"))
    ask(page, f"say:{HOSTILE}")
    said = page.locator(".assistant .said")
    assert said.locator("img, script, b").count() == 0 and said.locator("a").count() == 1
    assert said.locator("a").get_attribute("rel") == "noopener noreferrer nofollow"
    assert "<script>alert(2)</script>" in said.inner_text() and "<kept>" in said.inner_text()
    assert said.locator("h3").inner_text() == "Title" and said.locator("strong").inner_text() == "bold"
    assert said.locator("pre code").inner_text() == "</code><b>x</b>" and said.locator("li").count() == 2


def test_stop_ends_an_answer_and_tells_the_engine(page: Any, served: Server) -> None:
    page.fill("#prompt", "count")
    page.press("#prompt", "Enter")
    page.locator(".assistant .said p").wait_for()
    page.keyboard.press("Escape")
    page.wait_for_selector("#send")
    assert "stopped" in page.locator(".assistant .foot").inner_text()
    served.wait_idle(5)


def test_retry_edit_and_branch_keep_what_was(page: Any) -> None:
    ask(page, "say:one")
    with page.expect_response("**/v1/chat/completions") as caught:
        page.click(".assistant [aria-label=Retry]")
    told(page, caught.value)
    assert page.locator(".assistant .num").inner_text() == "2/2"
    page.click("[aria-label='Version before']")
    assert page.locator(".assistant .num").inner_text() == "1/2"
    page.hover(".user")
    page.click(".user [aria-label=Edit]")
    page.fill("[aria-label='Edit the text']", "say:two")
    with page.expect_response("**/v1/chat/completions") as caught:
        page.click("form.composer:has([aria-label='Edit the text']) .primary")
    told(page, caught.value)
    assert answers(page) == ["two"]
    page.click(".assistant [aria-label^=Branch]")
    assert page.locator("#conversations li").count() == 2 and answers(page) == ["two"]
    sent = ask(page, "say:three")["body"]["messages"]
    assert [turn["content"] for turn in sent] == ["say:two", "two", "say:three"]
    page.locator("#conversations li button").nth(2).click()
    page.click(".user [aria-label='Version before']")
    assert answers(page) == ["one"]


def test_settings_go_to_the_model_and_probabilities_come_back(page: Any, served: Server) -> None:
    page.click("#show-settings")
    page.fill("#system", "You are terse.")
    for name, value in {"temperature": "0.5", "top_k": "4", "max_tokens": "3", "seed": "7"}.items():
        page.fill(f"#a-{name}", value)
    page.fill("#a-stop", "END")
    page.locator("#a-stop").blur()
    page.check("#a-probabilities")
    body = ask(page, "say:abcdef")["body"]
    assert body["messages"][0] == {"role": "system", "content": "You are terse."}
    assert {name: body[name] for name in ("temperature", "top_k", "max_tokens", "seed", "stop", "top_logprobs")} == {
        "temperature": 0.5, "top_k": 4, "max_tokens": 3, "seed": 7, "stop": ["END"], "top_logprobs": 8,
    }  # fmt: skip
    assert "cut at the limit" in page.locator(".assistant .foot").inner_text()
    page.click("[aria-label^='Probabilities']")
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    whole = events(served.post("/v1/chat/completions", body))
    first = next(c["choices"][0]["logprobs"] for c in whole if c["choices"] and c["choices"][0].get("logprobs"))
    shown = page.locator(".tip tr.chosen td").nth(1).inner_text()
    assert page.locator(".tip tr.chosen td").first.inner_text() == first["content"][0]["token"] == "a"
    assert float(shown.split()[0]) == pytest.approx(100 * 2.718281828 ** first["content"][0]["logprob"], rel=0.01)
    page.hover(".tokens span:nth-child(2)")
    assert page.locator(".tip tr.chosen td").first.inner_text() == "b"


def test_two_settings_side_by_side(page: Any) -> None:
    page.click("#compare")
    page.fill("#b-max_tokens", "2")
    page.locator("#b-max_tokens").blur()
    ask(page, "say:abcdef")
    page.locator("[data-figure=tokens]").nth(1).wait_for()
    assert answers(page) == ["abcdef", "ab"]
    page.locator(".choose").nth(1).click()
    page.click("#compare")
    assert [turn["content"] for turn in ask(page, "say:x")["body"]["messages"]] == ["say:abcdef", "ab", "say:x"]


def test_files_history_and_export(page: Any, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("a ``` fence")
    (tmp_path / "binary.bin").write_bytes(b"\0\1")
    page.set_input_files("#file-input", [str(file), str(tmp_path / "binary.bin")])
    page.wait_for_selector(".chip")
    assert "binary.bin is no text" in page.locator(".toast").inner_text()
    sent = ask(page, "say:read")["body"]["messages"][0]["content"]
    assert sent == "notes.txt:\n````\na ``` fence\n````\n\nsay:read"
    page.reload()
    page.wait_for_selector("[data-figure=tokens]")
    assert answers(page) == ["read"] and page.locator(".user summary").inner_text() == "notes.txt"
    with page.expect_download() as saved:
        page.select_option("#export", "md")
    assert "## scripted\n\nread" in Path(saved.value.path()).read_text()
    with page.expect_download() as saved:
        page.select_option("#export", "json")
    assert json.loads(Path(saved.value.path()).read_text())["title"] == "say:read"
    page.on("dialog", lambda dialog: dialog.accept())
    page.hover("#conversations li")
    page.click("#conversations [aria-label^=Delete]")
    assert answers(page) == [] and page.evaluate("localStorage.getItem('headway.conversations')") == "[]"


def test_errors_are_the_servers_sentences(browser: Any, served: Server) -> None:
    with opened(browser, served.url, allowed=("status of 400",)) as page:
        page.fill("#prompt", "x" * 9000)
        page.press("#prompt", "Enter")
        page.wait_for_selector(".error:not([hidden])")
        assert "4096" in page.locator(".error").inner_text()


def test_a_key_is_asked_for_and_kept(browser: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    server = Server({"api_key_file": str(keys)})
    try:
        with opened(browser, server.url, allowed=("status of 401",)) as page:
            for key in ("wrong", "sesame"):
                page.fill("#key-input", key)
                page.click("#key-dialog .primary")
            page.wait_for_selector("#key-dialog", state="detached")
            ask(page, "say:open")
            page.reload()
            assert ask(page, "say:again")["usage"]["completion_tokens"] == 6
    finally:
        server.kill()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_use_it(browser: Any, served: Server, scheme: str) -> None:
    with opened(browser, served.url, color_scheme=scheme) as page:
        page.click("#show-settings")
        ask(page, f"say:{HOSTILE}")
        assert not serious(page)
        page.set_viewport_size({"width": 360, "height": 700})
        page.click("[aria-label='Close settings']")
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.click("#show-history")
        assert page.locator("#history").is_visible() and not serious(page)
        page.click("[aria-label='Light or dark']")
        assert page.evaluate("document.documentElement.dataset.theme") == ("dark" if scheme == "light" else "light")
