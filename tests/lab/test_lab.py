"""The lab in a real browser: its figures are Python's, its state is its address, and it moves as it is played."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import numpy as np
import pytest

from headway.core.request import SamplingParams
from headway.lab import frontier, request, sampler, traffic
from headway.roofline.hardware import find_hardware
from headway.roofline.replica import Replica, deploy
from headway.roofline.step import decode_step, prefill_step
from headway.sampling.pipeline import draw
from headway.sampling.trace import row_before
from headway.shape.catalogue import find_model
from headway.shape.model import kv_bytes
from tests.browser import chromium, opened, serious


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "headway", "lab", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found
        yield found.group().rstrip("/")
        process.terminate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


def ask(url: str, name: str, **given: Any) -> dict[str, Any]:
    response = httpx.get(f"{url}/api/{name}?{urlencode(given)}", timeout=30)
    found: dict[str, Any] = response.json()
    return found


def settled(page: Any) -> None:
    """No question is open any more."""
    page.locator("body[data-drawn]:not([data-open])").wait_for(state="attached")


# What is asked is what the verbs compute


def test_a_request_is_priced_by_the_step_time_model() -> None:
    found = request.answer(request.Request(prompt=1000, output=300))
    replica = deploy(find_model("llama-3.1-8b"), find_hardware("h100-sxm"), 1, mode=Replica)
    model = replica.step_time()
    assert found["ttft"] == model.predict(prefill_step(replica.shape, 1000))
    tokens = [model.predict(decode_step(replica.shape, 1, 1000 + index)) for index in range(1, 300)]
    assert found["decode"] == pytest.approx(sum(tokens), rel=1e-6)
    assert found["cache_bytes"] == kv_bytes(replica.shape, 1299)
    without = request.answer(request.Request(prompt=1000, output=300, cache=False))
    assert without["decode"] > 3 * found["decode"] and without["cache_bytes"] == 0
    hit = request.answer(request.Request(prompt=1000, output=300, cached=900, hit=True))
    assert hit["ttft"] == model.predict(prefill_step(replica.shape, 100, 900)) and hit["decode"] == found["decode"]
    single = request.answer(request.Request(prompt=1000, output=300, grouped=False))
    assert single["cache_bytes"] == 4 * found["cache_bytes"]


def test_the_sampler_is_the_pipelines() -> None:
    asked = sampler.Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=3)
    found = sampler.answer(asked)
    _, _, logits = sampler.place(asked)
    row = row_before((0,), 1, SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=3))
    drawn = [draw(logits, row, position) for position in range(1, 101)]
    assert found["draws"] == [drawn.count(id) for id in range(16)] and sum(found["draws"]) + found["tail_draws"] == 100
    assert found["stages"][3]["survivors"] == 20
    for stage in found["stages"]:
        assert sum(stage["shares"]) + stage["tail"] == pytest.approx(1)


def test_traffic_obeys_littles_law_and_policies_differ() -> None:
    quick = traffic.Traffic(requests=60)
    found = traffic.answer(quick)
    assert len(found["requests"]) == 60
    for one in found["requests"]:
        assert one["at"] <= one["admitted"] <= one["first"] <= one["end"]
    assert np.allclose(found["law"]["mean"], found["law"]["product"])
    stalls = {
        policy: traffic.answer(traffic.Traffic(requests=60, policy=policy, prompt=4000, rate=12))["pause"]["p90"]
        for policy in ("prefill-first", "chunked")
    }
    assert stalls["prefill-first"] > 2 * stalls["chunked"]


def test_the_frontier_lays_measured_runs_over_its_curve(tmp_path: Path) -> None:
    found = frontier.answer(frontier.Frontier(batch=77))
    assert found["dot"]["batch"] == 77 and found["measured"] == []
    table = tmp_path / "runs.csv"
    head = (
        "silicon_data_source,backend,backend_version,model_path,system,precision,mode,isl,osl,batch_size,tp_size,pp_size,attention_dp_size,"
        "moe_tp_size,moe_ep_size,silicon_ttft_ms,silicon_tpot_ms"
    )
    row = "silicon_concurrency=32,vllm,0.19.0,meta-llama/Llama-3.1-8B,h100_sxm,bf16,agg,1024,1024,32,1,1,1,1,1,100,12.5"
    table.write_text(f"{head}\n{row}\n")
    (point,) = frontier.answer(frontier.Frontier(), table)["measured"]
    assert (point["user"], point["gpu"]) == (pytest.approx(80), pytest.approx(32 * 80))


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("request", {"prompt": 0}), ("request", {"model": "nothing"}), ("sampler", {"temperature": -1}),
        ("sampler", {"place": "elsewhere"}), ("frontier", {"gpus": 3}), ("traffic", {"policy": "none"}),
        ("traffic", {"requests": 10**9}), ("traffic", {"rate": "fast"}), ("request", {"odd": 1}),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_sentence(url: str, name: str, given: dict[str, Any]) -> None:
    assert set(ask(url, name, **given)) == {"error"}


def test_other_hosts_and_files_are_refused(url: str) -> None:
    assert httpx.get(url, headers={"host": "evil.example"}).status_code == 400
    assert httpx.get(f"{url}/ui/..%2fapp.py").status_code == 404 and httpx.get(f"{url}/api/nothing").status_code == 404


# The pages


def test_request_page(browser: Any, url: str, tmp_path: Path) -> None:
    with opened(browser, url) as page:
        settled(page)
        page.click("text=Turn 40, prefix cached")
        settled(page)
        found = ask(url, "request", prompt=20000, output=300, cached=19500, hit="true")
        assert page.locator("#see").inner_text() == found["see"]
        assert page.locator("[data-figure=ttft]").inner_text() == f"{1e3 * found['ttft']:.3g} ms"
        assert "prompt=20000" in page.url and "hit=true" in page.url
        page.reload()
        settled(page)
        assert page.locator("#see").inner_text() == found["see"] and page.is_checked("#c-hit")
        page.uncheck("#c-cache")
        settled(page)
        assert "Without a cache" in page.locator("#see").inner_text()
        with page.expect_download() as saved:
            page.click("#csv")
        rows = list(csv.reader(Path(saved.value.path()).read_text().splitlines()))
        assert rows[0] == ["position", "seconds"] and float(rows[1][1]) > 0
        with page.expect_download() as saved:
            page.click("#png")
        assert Path(saved.value.path()).read_bytes().startswith(b"\x89PNG")
        assert not serious(page)


def test_sampler_page(browser: Any, url: str) -> None:
    with opened(browser, url, "/#sampler?temperature=0.5&top_k=5") as page:
        settled(page)
        found = ask(url, "sampler", temperature=0.5, top_k=5)
        assert page.locator("#see").inner_text() == found["see"]
        assert page.locator("#bars tbody tr").count() == 17
        assert page.locator("#bars tr.gone").count() == 12
        draws = [int(text) for text in page.locator("#bars tbody td:nth-child(4)").all_inner_texts()]
        assert draws == [*found["draws"], found["tail_draws"]]
        page.locator("#c-min_p").fill("0.3")
        settled(page)
        assert page.locator("#see").inner_text() == ask(url, "sampler", temperature=0.5, top_k=5, min_p=0.3)["see"]
        assert not serious(page)


def test_frontier_page(browser: Any, url: str) -> None:
    with opened(browser, url, "/#frontier") as page:
        settled(page)
        page.locator("#c-batch").fill("700")
        settled(page)
        batch = int(page.locator("#c-batch + output, output[for=c-batch]").inner_text().replace(",", ""))
        found = ask(url, "frontier", batch=batch)
        assert page.locator("#see").inner_text() == found["see"]
        assert page.locator("[data-figure=fits]").inner_text() == f"{found['fits']:,}"
        page.select_option("#c-kv", "fp8")
        settled(page)
        smaller = ask(url, "frontier", batch=batch, kv="fp8")
        assert (
            page.locator("[data-figure=fits]").inner_text() == f"{smaller['fits']:,}"
            and smaller["fits"] > found["fits"]
        )
        assert not serious(page)


def test_traffic_page(browser: Any, url: str) -> None:
    with opened(browser, url, "/#traffic") as page:
        settled(page)
        assert page.locator("#see").inner_text() == ask(url, "traffic")["see"]
        frames = int(page.locator("canvas").first.get_attribute("data-frames") or 0)
        time.sleep(0.5)
        assert int(page.locator("canvas[data-frames]").get_attribute("data-frames") or 0) > frames
        page.click("#play")
        page.locator("#at").fill("500")
        page.locator("#now", has_text="wait").wait_for()
        assert re.fullmatch(r"Until now L = .* and λW = .*", page.locator("#law").inner_text())
        page.select_option("#c-policy", "prefill-first")
        settled(page)
        assert page.locator("#see").inner_text() == ask(url, "traffic", policy="prefill-first")["see"]
        assert not serious(page)
        page.set_viewport_size({"width": 360, "height": 700})
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert json.loads(page.evaluate("JSON.stringify(Object.keys(localStorage))")) == []
