"""The live page, in a real browser, and what it is told: an engine at work, ten times a second."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from headway.engine.picture import picture
from headway.serve.live import MOST_WATCHERS
from tests.browser import chromium, opened, serious
from tests.serve.conftest import Server
from tests.serve.scripted import engine

STREAM = {"accept": "text/event-stream"}


@pytest.fixture(scope="module")
def busy() -> Iterator[Server]:
    """A server with room for two requests, a step of which takes a hundredth of a second."""
    server = Server({"price": 3.6, "engine": {"seconds": 0.01, "blocks": 300, "max_rows": 2}})
    yield server
    server.kill()


@contextmanager
def asking(server: Server, *prompts: str, **headers: str) -> Iterator[None]:
    """Requests that go on until the block ends: then their clients leave."""
    with ExitStack() as stack:
        for number, prompt in enumerate(prompts, 1):
            body = json.dumps({"messages": [{"role": "user", "content": prompt}], "stream": True})
            more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n{more}content-length: {len(body)}\r\n\r\n"
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            client.sendall((head + body).encode())
            await_rows(server, number, **headers)
        yield


def await_rows(server: Server, count: int, **headers: str) -> dict[str, Any]:
    """The first sample with so many live requests."""
    for _ in range(200):
        sample: dict[str, Any] = httpx.get(f"{server.url}/v1/live", headers=headers).json()
        if len(sample["rows"]) == count and all(
            row["place"] != "running" or row["generated"] for row in sample["rows"]
        ):
            return sample
        time.sleep(0.02)
    raise AssertionError(f"never {count} requests at once")


@contextmanager
def watching(server: Server, *keys: str) -> Iterator[list[list[dict[str, Any]]]]:
    """What each key is told while the block runs, and a moment longer."""
    found: list[list[dict[str, Any]]] = [[] for _ in keys]
    done = threading.Event()

    def watch(key: str, told: list[dict[str, Any]]) -> None:
        headers = STREAM | ({"authorization": f"Bearer {key}"} if key else {})
        with httpx.stream("GET", f"{server.url}/v1/live", headers=headers, timeout=10) as response:
            left = 3  # samples after the block's end
            for line in response.iter_lines():
                if line.startswith("data: "):
                    told.append(json.loads(line[6:]))
                    left -= done.is_set()
                if not left:
                    return

    watchers = [threading.Thread(target=watch, args=pair) for pair in zip(keys, found, strict=True)]
    for watcher in watchers:
        watcher.start()
    for _ in range(1000):
        if all(found):
            break
        time.sleep(0.01)
    yield found
    done.set()
    for watcher in watchers:
        watcher.join()


def events_of(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for sample in samples for event in sample["events"]]


def test_a_sample_agrees_with_the_metrics_and_with_itself(busy: Server) -> None:
    with asking(busy, "count" + "x" * 200, "count" + "x" * 200, "count again"):
        sample, metrics = await_rows(busy, 3), busy.metrics()
    (pool,) = sample["pools"]
    places = [row["place"] for row in sample["rows"]]
    assert (places.count("running"), places.count("waiting"), sample["blocked"]) == (2, 1, "rows")
    assert metrics["headway:requests_running"] == 2 and metrics["headway:requests_waiting"] == 1
    assert pool["size"] == metrics["headway:kv_blocks"] == len(pool["states"])
    owned = [set(ids(row["blocks"][0])) for row in sample["rows"]]
    states = pool["states"]
    assert {block for block in range(len(states)) if states[block] in "23"} == set.union(*owned)
    assert {block for block in range(len(states)) if states[block] == "3"} == owned[0] & owned[1] != set()
    assert pool["used"] == len(set.union(*owned)) and pool["cached"] == states.count("1")


def ids(runs: list[int]) -> Iterator[int]:
    for first, count in zip(runs[::2], runs[1::2], strict=True):
        yield from range(first, first + count)


def steps_made(server: Server) -> float:
    """Steps of an idle server: a request that ends is told before the step that it ended in."""
    seen = [server.wait_idle(5)["headway:steps_total"]]
    while len(seen) < 10 or len(set(seen[-10:])) > 1:
        time.sleep(0.02)
        seen.append(server.metrics()["headway:steps_total"])
    return seen[-1]


def test_a_watcher_is_told_every_step_and_every_fate(busy: Server) -> None:
    before = steps_made(busy)
    with watching(busy, "") as (found,):
        busy.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "say:hello"}]})
        steps = steps_made(busy) - before
    told = events_of(found)
    kinds = [event["k"] for event in told]
    assert kinds.count("step") == steps
    number = next(event["n"] for event in told if event["k"] == "queued")
    assert [event["k"] for event in told if event.get("n") == number] == [
        "queued", "admitted", "first", "finished", "receipt"
    ]  # fmt: skip
    (receipt,) = [event for event in told if event["k"] == "receipt"]
    assert receipt["dollars"] == pytest.approx(receipt["machine_seconds"] * 3.6 / 3600)
    assert (
        sum(event["counts"][0] for event in told if event["k"] == "step" and event["rows"])
        == receipt["computed_tokens"]
    )


def test_other_keys_see_lengths_only(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    server = Server({"api_key_file": str(keys), "engine": {"seconds": 0.005}})
    try:
        assert httpx.get(f"{server.url}/v1/live").status_code == 401
        with watching(server, "one", "two") as found:
            body = {"messages": [{"role": "user", "content": "say:" + "secret" * 20}]}
            server.post("/v1/chat/completions", body, headers={"authorization": "Bearer one"})
        for samples, own in zip(found, (True, False), strict=True):
            rows = [row for sample in samples for row in sample["rows"]]
            told = events_of(samples)
            assert rows and {row["own"] for row in rows} == {own} and {row["id"] is None for row in rows} == {not own}
            assert [event["k"] for event in told].count("receipt") == own
            assert [event["id"] is None for event in told if event["k"] == "queued"] == [not own]
            assert "secret" not in json.dumps(samples)
    finally:
        server.kill()


def test_nobody_looks_and_nothing_is_kept(busy: Server) -> None:
    for _ in range(MOST_WATCHERS + 4):  # those who leave make room
        with httpx.stream("GET", f"{busy.url}/v1/live", headers=STREAM) as response:
            assert response.status_code == 200 and next(response.iter_lines()).startswith("data: ")
    with httpx.stream("GET", f"{busy.url}/v1/live", headers=STREAM) as response:
        assert response.status_code == 200


def test_looking_takes_little_of_a_full_cache() -> None:
    """A picture of 4096 blocks and 64 rows; the server then waits fifty times as long before it asks again."""
    loop = engine(lambda event: None, blocks=4096, max_rows=64, context=4096, seconds=0.0)
    pool = loop.scheduler.cache.pools[0]
    pool.take_many(4000)
    best = min(picture(loop.scheduler.state, "", 0).seconds for _ in range(5))
    assert best * 10 < 0.2  # of a second, ten times a second; measured: 0.5 ms
    loop.close()


def test_the_live_page_shows_what_the_server_says(busy: Server) -> None:
    busy.wait_idle(5)
    with chromium() as browser, opened(browser, busy.url, "/ui/live.html") as page:
        page.locator("#state.on").wait_for()
        with asking(busy, "count" + "x" * 300, "count" + "x" * 300, "count third"):
            page.locator("[data-figure=waiting]", has_text="1").wait_for()
            assert page.locator("[data-figure=running]").inner_text() == "2"
            page.locator("#batch-see", has_text="all rows of the batch are taken").wait_for()
            page.locator("[data-state=shared]", has_text=re.compile("^[1-9][0-9]* shared")).wait_for()
            page.hover("#blocks", position={"x": 4, "y": 4})
            page.locator("#blocks-see", has_text="request").wait_for()
        for word in ("one", "two"):
            busy.post("/v1/chat/completions", {"messages": [{"role": "user", "content": f"say:{word}"}]})
        page.locator("[data-figure=running]", has_text="0").wait_for()
        page.locator("#bills tbody tr").nth(4).wait_for()
        page.select_option("#span", "60")
        page.locator("#lanes-see", has_text=re.compile("^5 requests")).wait_for()
        missed = page.locator("#misses tbody tr").first.locator("td").all_inner_texts()
        assert int(missed[1]) == int(missed[2]) + int(missed[3]) and "cached" in missed[4]
        page.select_option("#span", "5")
        page.locator("[data-figure=kv]", has_text="0 %").wait_for()
        assert not serious(page)
        page.set_viewport_size({"width": 360, "height": 800})
        width = "document.documentElement.scrollWidth"
        for _ in range(100):  # until it is drawn again; what waits in the page itself, the page's policy forbids
            if page.evaluate(width) <= 360:
                break
            page.wait_for_timeout(50)
        assert page.evaluate(width) <= 360
