"""Could the client have measured the run?"""

from __future__ import annotations

from headway.bench.selftest import SelfTest, client_report, run_async, self_test
from headway.traffic.load import Load
from tests.bench.streams import record, run_of

GOOD = SelfTest(ceiling=20_000, added_p50_ms=0.4, added_p99_ms=1.2, loop="asyncio")
OPEN = Load("constant", rate=10)


def test_the_self_test_measures_a_real_client() -> None:
    found = run_async(self_test())
    assert found.ceiling > 0
    assert 0 < found.added_p50_ms <= found.added_p99_ms


def test_an_easy_run_is_valid() -> None:
    found = client_report(GOOD, run_of(record(late_ms=1), load=OPEN))
    assert found["valid"] is True and found["reason"] is None
    assert (found["ceiling"], found["added_latency_ms"]) == (20_000, 1.2)


def test_near_its_ceiling_the_client_is_the_bottleneck() -> None:
    run = run_of(record(), load=OPEN)
    run.chunks_per_second = 15_000
    assert "ceiling" in client_report(GOOD, run)["reason"]


def test_out_of_cpu_it_is_too() -> None:
    run = run_of(record(), load=OPEN)
    run.cpu_share = 0.95
    assert client_report(GOOD, run)["valid"] is False


def test_lateness_counts_where_it_shows() -> None:
    """30 ms late spoils a TTFT of 200 ms, but not one of 2 s."""
    assert client_report(GOOD, run_of(record(late_ms=30), load=OPEN))["valid"] is False
    assert client_report(GOOD, run_of(record(first_ms=2000, late_ms=30), load=OPEN))["valid"] is True


def test_without_a_self_test_the_run_is_still_judged() -> None:
    found = client_report(None, run_of(record(late_ms=30), load=OPEN))
    assert found["ceiling"] is None and found["valid"] is False
