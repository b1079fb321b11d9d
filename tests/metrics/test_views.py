"""One synthetic stream, and the answer each tool is known to give for it.

200 ms to the first token, then 100 chunks of 3 tokens every 30 ms (301 tokens), usage 5 ms and [DONE] 6 ms later.
"""

from __future__ import annotations

from typing import Any

import pytest

from headway.core.errors import BadInput
from headway.metrics.views import VIEWS, view
from tests.bench.streams import failed, record, run_of


def pick(found: Any, path: str) -> Any:
    for key in path.split("/"):
        found = found[key]
    return found


@pytest.mark.parametrize(
    ("tool", "api", "answers"),
    [
        ("vllm", "completions", {"mean_ttft_ms": 200, "mean_tpot_ms": 10.0, "mean_itl_ms": 30, "median_itl_ms": 30,
                                 "p99_itl_ms": 30, "mean_e2el_ms": 3200}),
        ("vllm", "chat", {"mean_ttft_ms": 200, "mean_tpot_ms": 3005 / 300, "mean_itl_ms": 30, "mean_e2el_ms": 3205}),
        ("sglang", "chat", {"mean_ttft_ms": 200, "mean_tpot_ms": 3006 / 300, "mean_itl_ms": 30, "median_itl_ms": 30,
                            "p99_itl_ms": 30, "mean_e2e_latency_ms": 3206}),
        ("guidellm", "chat", {"time_to_first_token_ms/mean": 200, "time_per_output_token_ms/mean": 3200 / 301,
                              "inter_token_latency_ms/mean": 10.0, "request_latency/mean": 3.206}),
        ("aiperf", "chat", {"time_to_first_token/avg": 200, "inter_token_latency/avg": 10.0,
                            "inter_chunk_latency/avg": 30, "inter_chunk_latency/p50": 30, "inter_chunk_latency/p99": 30,
                            "time_to_second_token/avg": 30, "request_latency/avg": 3200}),
    ],
)  # fmt: skip
def test_known_answers(tool: str, api: str, answers: dict[str, float]) -> None:
    found = view(tool, run_of(record()), api)
    for path, value in answers.items():
        assert pick(found, path) == pytest.approx(value, abs=1e-6), path


def test_vllm_takes_a_role_chunk_for_the_first_token_and_a_finish_chunk_for_a_gap() -> None:
    found = view("vllm", run_of(record(role_ms=50, finish=True)), "chat")
    assert found["mean_ttft_ms"] == pytest.approx(50)
    assert found["mean_itl_ms"] == pytest.approx((150 + 100 * 30 + 0) / 102)


@pytest.mark.parametrize(
    ("tool", "path"),
    [("sglang", "mean_ttft_ms"), ("guidellm", "time_to_first_token_ms/mean"), ("aiperf", "time_to_first_token/avg")],
)
def test_the_others_do_not(tool: str, path: str) -> None:
    assert pick(view(tool, run_of(record(role_ms=50)), "chat"), path) == pytest.approx(200)


@pytest.mark.parametrize("tool", VIEWS)
def test_all_count_from_when_it_was_sent_and_leave_failures_out(tool: str) -> None:
    path = {"guidellm": "time_to_first_token_ms/mean", "aiperf": "time_to_first_token/avg"}.get(tool, "mean_ttft_ms")
    found = view(tool, run_of(record(late_ms=150), failed()), "chat")
    assert pick(found, path) == pytest.approx(50)


def test_guidellm_does_not_interpolate() -> None:
    runs = run_of(*(record(first_ms=100.0 * (n + 1)) for n in range(4)))
    assert view("guidellm", runs, "chat")["time_to_first_token_ms"]["median"] == pytest.approx(200)
    assert view("aiperf", runs, "chat")["time_to_first_token"]["p50"] == pytest.approx(250)


def test_aiperf_leaves_the_first_chunks_tokens_out_where_they_are_told() -> None:
    found = view("aiperf", run_of(record(chunks=11, tokens=44, told=4)), "chat")
    assert found["inter_token_latency"]["avg"] == pytest.approx(300 / 40)


@pytest.mark.parametrize("tool", VIEWS)
def test_an_empty_run_is_no_crash(tool: str) -> None:
    assert view(tool, run_of(failed()), "chat")["tool"] == tool


def test_an_unknown_tool_is_refused() -> None:
    with pytest.raises(BadInput, match="vllm, sglang, guidellm, aiperf"):
        view("wrk", run_of(record()), "chat")
