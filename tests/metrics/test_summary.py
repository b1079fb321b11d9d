"""The numbers of a run and the names the JSON contract gives them."""

from __future__ import annotations

from typing import Any

import pytest

from headway.bench.measure import unexpected
from headway.bench.options import Workload
from headway.bench.workload import Measure
from headway.core.errors import BadInput
from headway.metrics.files import to_json
from headway.metrics.records import FailureKind
from headway.metrics.summary import Targets, answers, attainment, delivered, summarize
from headway.traffic.load import Load
from tests.bench.streams import failed, record, run_of


def test_the_contract() -> None:
    found = summarize(run_of(*(record(at_ms=10.0 * n) for n in range(40))), Targets(ttft_ms=1000))
    for name in ("ttft_ms", "tpot_ms", "itl_token_ms", "itl_chunk_ms", "e2e_ms"):
        assert {"mean", "p50", "p90", "p95", "p99"} <= found[name].keys()
    assert found["ttft_ms"]["p99"] is None and found["ttft_ms"]["reason"]
    assert found["itl_chunk_ms"]["p99"] == pytest.approx(30)
    assert {"throughput", "slo", "failures", "cached_tokens"} <= found.keys()
    to_json(found)


def test_throughput_is_tokens_over_the_measured_window() -> None:
    """Two requests, 1 s apart: from the first intended start to the last token 4.2 s."""
    found = summarize(run_of(record(), record(at_ms=1000)))["throughput"]
    assert found["window_s"] == pytest.approx(4.2)
    assert found["output"] == pytest.approx(602 / 4.2)
    assert found["input"] == pytest.approx(100 / 4.2)
    assert found["total"] == pytest.approx(702 / 4.2)
    assert found["requests"] == pytest.approx(2 / 4.2)


def test_warmup_counts_for_nothing() -> None:
    cold = record(first_ms=9000)
    cold.warmup = True
    found = summarize(run_of(cold, record()))
    assert found["requests"] == {"total": 1, "completed": 1, "failed": 0, "warmup": 1}
    assert found["ttft_ms"]["mean"] == pytest.approx(200)


def test_failures_are_counted_by_kind_and_explained() -> None:
    found = summarize(run_of(record(), failed(), failed(), failed(FailureKind.HUNG)))
    assert found["failures"] == {"http_error": 2, "hung": 1}
    assert found["failure_messages"] == {"http_error": "it failed", "hung": "it failed"}
    assert found["requests"]["failed"] == 3


def test_a_request_that_broke_keeps_what_was_measured_of_it() -> None:
    broken = record(first_ms=400)
    broken.failure = failed(FailureKind.HALF_CLOSED).failure
    found = summarize(run_of(record(first_ms=200), broken))
    assert found["ttft_ms"]["n"] == 2
    assert found["ttft_ms"]["mean"] == pytest.approx(300)
    assert found["e2e_ms"]["n"] == found["tpot_ms"]["n"] == 1
    assert found["tails_with_failures"]["ttft_ms"]["p50"] == "inf"


def test_when_everything_fails_there_are_nulls_and_reasons_not_zeros() -> None:
    found = summarize(run_of(failed(), failed()))
    assert found["ttft_ms"]["mean"] is None and found["ttft_ms"]["reason"] == "no token arrived"
    assert found["throughput"]["output"] is None and found["throughput"]["reason"]
    to_json(found)


def test_without_usage_nothing_is_counted_by_chunk() -> None:
    found = summarize(run_of(record(tokens=None)))
    assert found["tpot_ms"]["mean"] is None
    assert "usage" in found["tpot_ms"]["reason"] and "usage" in found["throughput"]["reason"]
    assert found["ttft_ms"]["mean"] == pytest.approx(200)


def test_cached_tokens() -> None:
    found = summarize(run_of(record(cached=0), record(cached=25)))["cached_tokens"]
    assert (found["total"], found["share"], found["requests_with_hits"]) == (25, 0.25, 1)
    untold = summarize(run_of(record()))["cached_tokens"]
    assert untold["total"] is None and untold["reason"]


@pytest.mark.parametrize(
    ("targets", "good"),
    [
        (Targets(ttft_ms=200), True),
        (Targets(ttft_ms=199), False),
        (Targets(ttft_ms=200, tpot_ms=10), True),
        (Targets(ttft_ms=200, tpot_ms=9.9), False),
        (Targets(e2e_ms=3200), True),
        (Targets(e2e_ms=3199), False),
    ],
)
def test_a_request_is_good_if_it_meets_all_targets(targets: Targets, good: bool) -> None:
    assert targets.met_by(record()) is good
    assert not targets.met_by(failed())


def test_one_token_passes_a_gap_target_and_an_untold_count_does_not() -> None:
    targets = Targets(tpot_ms=5)
    assert targets.met_by(record(chunks=1, tokens=1))
    assert not targets.met_by(record(tokens=None))


def test_attainment_counts_failures_and_carries_its_interval() -> None:
    found = summarize(run_of(*[record()] * 9, failed()), Targets(ttft_ms=300, attainment=0.9))["slo"]
    assert found["attainment"] == 0.9
    assert found["ci95"] == pytest.approx([0.5550, 0.9975], abs=1e-4)
    assert not found["held"]


def test_targets_from_text_are_milliseconds() -> None:
    assert Targets.parse("ttft=1s,tpot=50ms", 0.9).limits == {"ttft": 1000, "tpot": 50}
    with pytest.raises(BadInput, match="--slo"):
        Targets.parse("ttft=fast", 0.9)


def test_delivered_load_is_checked() -> None:
    load = Load("constant", rate=10)
    on_time = run_of(*(record(at_ms=100.0 * n) for n in range(20)), load=load)
    slow = run_of(*(record(at_ms=100.0 * n, late_ms=30.0 * n) for n in range(20)), load=load)
    assert delivered(on_time)["delivered"] and delivered(on_time)["intended_rate"] == pytest.approx(10)
    assert not delivered(slow)["delivered"]


def test_a_share_that_is_not_proven_says_how_many_requests_would_do() -> None:
    good = [record() for _ in range(20)]
    found = attainment(good, Targets(ttft_ms=1000, attainment=0.9))
    assert (found["attainment"], found["held"], found["needed"]) == (1.0, False, 36)
    assert attainment([record() for _ in range(36)], Targets(ttft_ms=1000, attainment=0.9))["held"]
    missed = [record(first_ms=2000.0)]
    assert attainment([*good, *missed * 5], Targets(ttft_ms=1000, attainment=0.9))["needed"] is None


def test_what_was_not_asked_for_is_a_warning() -> None:
    def warned(workload: Workload, **of: Any) -> str:
        records = [record(**of) for _ in range(4)]
        return " ".join(unexpected(records, {"answers": answers(records)}, workload, Measure(overhead=20, known=True)))

    plain = Workload()
    assert "4 of 4 answers are shorter than asked for (mean 301 of 4096 tokens; finish_reason stop)" in warned(plain)
    assert "shorter" not in warned(plain, tokens=4096)
    assert "96% of the prompt tokens came from the prefix cache" in warned(plain, prompt=500, cached=500)
    assert "cache" not in warned(plain, prompt=500, cached=32), "a template's own tokens, and a little"
    assert "cache" not in warned(Workload(shared_prefix=100), prompt=500, cached=400)
