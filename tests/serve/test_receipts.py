"""Itemised bills: for who asks, in every kind of answer, and all of them in the metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.conftest import Server, events, parse_metrics

Start = Callable[..., Server]
ASK = {"x-headway-receipt": "1"}
TIMES = {"queue_ms", "prefill_ms", "decode_ms", "stalls_ms"}
FIELDS = TIMES | {"computed_tokens", "cached_tokens", "machine_seconds", "dollars"}


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


@pytest.fixture
def priced(start: Start) -> Server:
    return start(price=3.6)


@pytest.mark.parametrize("stream", [False, True])
def test_usage_shows_the_bill_to_who_asks(priced: Server, stream: bool) -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = priced.post("/v1/chat/completions", body("say:hello", n=2, **more), headers=ASK)
    usage = events(answer)[-1]["usage"] if stream else answer.json()["usage"]
    bill = usage["receipt"]
    assert bill.keys() == FIELDS
    assert 1e3 * bill["machine_seconds"] == pytest.approx(bill["prefill_ms"] + bill["decode_ms"])
    assert bill["dollars"] == pytest.approx(bill["machine_seconds"] * 1e-3)
    assert bill["computed_tokens"] >= usage["total_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] - 2
    assert min(bill.values()) >= 0 < bill["machine_seconds"]


def test_without_a_price_there_are_no_dollars_and_unasked_no_bill(server: Server) -> None:
    asked = server.post("/v1/completions", {"prompt": "say:hello"}, headers=ASK).json()
    assert asked["usage"]["receipt"].keys() == FIELDS - {"dollars"}
    assert "receipt" not in server.post("/v1/completions", {"prompt": "say:hello"}).json()["usage"]


def test_metrics_tell_the_time_of_each_key_also_of_clients_that_leave(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one\nsk-two\n")
    server = start(api_key_file=str(keys), engine={"seconds": 0.002})
    for key in ("sk-one", "sk-two", "sk-one"):
        server.post("/v1/chat/completions", body("say:hello"), headers={"authorization": f"Bearer {key}"})
    stream = body("count", stream=True, max_tokens=2000)
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=stream, headers={"x-api-key": "sk-two"}
    ) as left:
        next(left.iter_lines())
    end = time.monotonic() + 10
    while True:
        read = parse_metrics(httpx.get(f"{server.url}/metrics", headers={"x-api-key": "sk-one"}).text)
        billed = [value for name, value in read.items() if name.startswith("headway:billed_seconds_total")]
        if not read["headway:requests_running"] and len(billed) == 2:
            break
        assert time.monotonic() < end
    assert min(billed) > 0
    assert sum(billed) >= 0.5 * read["headway:step_seconds_total"]  # and the loop's own work beside the executor's
