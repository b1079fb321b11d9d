"""`headway simulate` from the outside: the object of a bench, and what only a simulation has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main
from headway.core.clock import VirtualClock
from headway.core.errors import BadInput
from headway.core.events import EventLog
from headway.core.step import Capabilities
from headway.engine.event_file import EventWriter
from headway.executor.simulated import SimulatedRanks
from headway.metrics.files import load_records
from headway.roofline.fixed import FixedCosts
from headway.scheduling.scheduler import Scheduler
from headway.simulate.arrivals import Closed, Lengths, rows_of
from headway.simulate.deploy import EngineSetup
from headway.simulate.driver import SimulatedReplica, run
from headway.simulate.front import Front
from headway.simulate.traffic import Traffic
from headway.simulate.trail import Trail
from headway.simulate.workload import Answers, of_row
from headway.traffic.traces import TraceRow

BASE = ["simulate", "--model", "llama-3.1-8b", "--hardware", "h100-sxm", "--requests", "30"]
SHORT = ["--input-tokens", "300", "--output-tokens", "12"]
BENCH_KEYS = {"ttft_ms", "tpot_ms", "itl_token_ms", "e2e_ms", "throughput"}


def simulated(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as ended:
        main([*BASE, *args, "--json"])
    out = capsys.readouterr().out
    assert not ended.value.code, out
    return json.loads(out)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*BASE, *args])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_an_open_loop_prints_the_object_of_a_bench_and_more(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = tmp_path / "records.json"
    found = simulated(
        capsys, "--rate", "20", *SHORT, "--slo", "ttft=1s,tpot=50ms", "--as", "vllm", "--records", str(saved),
        "--csv", str(tmp_path / "rows.csv"), "--html", str(tmp_path / "page.html"),
    )  # fmt: skip
    assert found.keys() >= BENCH_KEYS | {"slo", "goodput", "steps", "queue", "batch", "kv_use", "little", "stability"}
    assert found["requests"]["completed"] == 30 and found["throughput"]["output_tokens"] == 360
    assert found["slo"]["attainment"] == 1.0 and found["stability"]["stable"]
    assert found["as"]["mean_ttft_ms"] == pytest.approx(found["ttft_ms"]["mean"])
    for name in ("queue", "batch", "kv_use"):
        assert all(len(point) == 2 for point in found[name]["series"]) and found[name]["series"]
    assert found["little"]["system"]["error_pct"] == pytest.approx(0, abs=0.01)
    loaded, _ = load_records(saved)
    assert [record.output_tokens for record in loaded.records] == [12] * 30
    assert "Requests waiting" in (tmp_path / "page.html").read_text()


def test_the_same_twice_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--rate", "50", "--input-tokens", "200", "--input-cv", "1", "--output-tokens", "20", "--output-cv", "1")
    once = simulated(capsys, *args)
    assert simulated(capsys, *args) == once
    assert simulated(capsys, *args, "--seed", "1")["ttft_ms"] != once["ttft_ms"]


def test_a_closed_loop_keeps_its_number_in_flight(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(capsys, "--concurrency", "4", *SHORT)
    assert found["load"]["kind"] == "closed"
    assert max(count for _, count in found["running"]["series"]) <= 4


def test_conversations_find_what_was_said_before(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--rate", "5", "--turns", "3", "--think", "0.2", "--input-tokens", "100", "--output-tokens", "33")
    kept = simulated(capsys, *args)
    assert kept["requests"]["completed"] == 30
    assert kept["cached_tokens"]["share"] > 0.5
    assert simulated(capsys, *args, "--no-prefix-cache")["cached_tokens"]["share"] == 0
    forgotten = simulated(capsys, *args, "--prefix-ttl", "0.0001")
    assert forgotten["cached_tokens"]["share"] == 0, "whoever thinks for longer finds nothing"


def test_traces_bring_their_times_lengths_and_prefixes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    row = {"timestamp": 0, "input_length": 1100, "output_length": 4, "hash_ids": [1, 2, 3]}
    trace.write_text("".join(json.dumps(row | {"timestamp": 777 * n}) + "\n" for n in range(4)))
    found = simulated(capsys, "--trace", str(trace))
    assert found["load"]["kind"] == "trace" and found["requests"]["total"] == 4
    assert found["throughput"]["input_tokens"] == 4400
    assert found["cached_tokens"]["total"] == 3 * (1099 // 32) * 32
    faster = simulated(capsys, "--trace", str(trace), "--rate", "100")
    assert faster["load"]["kind"] == "poisson"


def test_what_a_log_recorded_is_planned_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    serve_recorded(log)
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "replay", str(log)])
    assert not ended.value.code and "steps are planned as they were" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "replay", str(tmp_path / "none")])
    assert ended.value.code == 2 and "LOG: no such file" in capsys.readouterr().err


def test_what_a_log_recorded_is_played_on_another_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    serve_recorded(log)
    found = simulated(capsys, "--log", str(log), "--slo", "ttft=1s", "--price", "2")
    assert found["requests"]["total"] == found["measured"]["requests"]["total"] == 6
    assert found["throughput"]["output_tokens"] == found["measured"]["throughput"]["output_tokens"] == 6 * 9
    assert found["cached_tokens"]["total"] == found["measured"]["cached_tokens"]["total"] > 0
    assert found["measured"]["slo"]["attainment"] < found["slo"]["attainment"] == 1.0, "it was a slow machine"
    assert found["measured"]["tpot_ms"]["mean"] == pytest.approx(500, rel=0.01)
    assert found["cost"]["per_million_output"] == pytest.approx(1e6 * found["cost"]["dollars"] / 54)
    assert found["cost"]["dollars"] == pytest.approx(2 * found["throughput"]["window_s"] / 3600, rel=0.01)


def serve_recorded(path: Path) -> None:
    """Six requests that begin alike, one after the other, on an engine that takes half a second a step."""
    limits = Capabilities(
        block_size=32, blocks=(199,), windows=(None,), max_rows=4, max_tokens_per_step=4096, max_model_len=4096
    )
    log, clock, answers, costs = EventLog(), VirtualClock(), Answers(), FixedCosts(step=0.5, token=1e-3)
    scheduler = Scheduler(limits, key=b"secret", log=log)
    replica = SimulatedReplica([scheduler], SimulatedRanks(limits, clock, costs, answers), clock, answers)
    with EventWriter(path, scheduler.header()) as writer:
        log.subscribe(writer)
        run([replica], Closed([TraceRow(0, 700, 9)] * 6, 1, shared=600), Trail(), answers)


def test_policies_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = ("--rate", "20", *SHORT, "--policy", "chunked,static", "--max-rows", "4", "--plot", str(tmp_path / "p.svg"))
    both = simulated(capsys, *args)["policies"]
    assert list(both) == ["chunked", "static"]
    assert both["static"]["ttft_ms"]["mean"] > both["chunked"]["ttft_ms"]["mean"], "a batch waits for its slowest"
    assert (tmp_path / "p.svg").is_file()


def test_contiguous_memory_admits_fewer(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--rate", "200", *SHORT, "--max-model-len", "8192", "--kv-cache-gib", "8")
    paged, contiguous = (simulated(capsys, *args, "--memory", kind) for kind in ("paged", "contiguous"))
    assert contiguous["limits"]["blocks"] == [8]
    assert contiguous["batch"]["mean"] < paged["batch"]["mean"]
    assert contiguous["kv_filled"]["max"] < 0.1 < contiguous["kv_use"]["max"], "most of what is reserved stays empty"


@pytest.mark.parametrize("router", ["round-robin", "least-loaded", "prefix", "session", "power-of-two"])
def test_replicas_share_a_load(capsys: pytest.CaptureFixture[str], router: str) -> None:
    one = simulated(capsys, "--rate", "200", *SHORT)
    two = simulated(capsys, "--rate", "200", *SHORT, "--replicas", "2", "--router", router)
    assert two["replicas"] == 2 and two["router"] == router and two["tpot_ms"]["mean"] < one["tpot_ms"]["mean"]


def test_full_replicas_let_requests_wait_at_the_router(capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--rate", "200", *SHORT, "--replicas", "2", "--router", "least-loaded")
    free, few = simulated(capsys, *load), simulated(capsys, *load, "--most-in-flight", "2")
    assert few["load"] == free["load"] and few["batch"]["mean"] <= 2 < free["batch"]["mean"]
    assert few["ttft_ms"]["mean"] > free["ttft_ms"]["mean"], "waiting there is waiting too"


@pytest.mark.parametrize("router", ["prefix", "session"])
def test_conversations_stay_where_their_prefix_is(capsys: pytest.CaptureFixture[str], router: str) -> None:
    talk = ("--rate", "4", "--turns", "5", "--requests", "100", "--input-tokens", "300", "--output-tokens", "20",
            "--replicas", "4")  # fmt: skip
    turns, kept = simulated(capsys, *talk), simulated(capsys, *talk, "--router", router)
    assert kept["cached_tokens"]["total"] > 2 * turns["cached_tokens"]["total"]


def test_the_highest_rate_is_searched(capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--rate", "12", "--search", "--input-tokens", "200", "--output-tokens", "20", "--max-rows", "2",
            "--requests", "40")  # fmt: skip
    found = simulated(capsys, *load)["saturation"]
    assert 2 < found["rate"] < found["fails_at"] < 40
    assert found["fails_at"] <= found["rate"] * 1.05 * 1.001
    good = simulated(capsys, *load, "--slo", "ttft=300ms", "--attainment", "0.6", "--requests", "12")["goodput"]
    assert good["searched"] and good["rate"] < found["fails_at"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--policy", "fifo"], "policy: 'fifo' is not one of chunked"), (["--memory", "heap"], "--memory"),
        (["--rate", "1", "--concurrency", "2"], "--concurrency"), (["--arrival", "often", "--rate", "1"], "--arrival"),
        (["--burstiness", "2", "--rate", "1"], "--burstiness"), (["--replicas", "0"], "--replicas"),
        (["--router", "random"], "--router"),
        (["--most-in-flight", "0"], "--most-in-flight"), (["--turns", "2"], "--turns"), (["--search"], "--search"),
        (["--as", "ab"], "--as"), (["--block-size", "0"], "--block-size"), (["--input-cv", "-1"], "--input-cv"),
        (["--output-tokens", "0"], "--output-tokens"), (["--slo", "ttft=-1"], "--slo"), (["--rate", "0"], "--rate"),
        (["--kv-cache-gib", "500"], "--kv-cache-gib"), (["--tp", "3"], "--tp"), (["--think", "-1"], "--think"),
        (["--hardware", "rtx-4090", "--model", "llama-3.1-70b"], "does not fit"), (["--host-us", "-1"], "--host-us"),
        *[([option, "1e308", *rest], option) for option, *rest in (
            ["--rate"], ["--burstiness", "--rate", "1", "--arrival", "gamma"], ["--think"], ["--prefix-ttl"],
            ["--max-wait"], ["--host-us"], ["--price"],
        )],
        (["--rate", "1e-9"], "--requests: they take more than 107 days"),
        (["--think", "1e8", "--rate", "1", "--turns", "2"], "--requests: they take more than 107 days"),
        (["--log", "/nowhere"], "/nowhere"), (["--requests", "0"], "--requests"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str], args: list[str], says: str) -> None:
    assert says in refused(capsys, *args)


def test_lengths_have_the_mean_and_the_spread_asked_for() -> None:
    rows = rows_of(Lengths(input_tokens=500, output_tokens=50, input_cv=1.5), 20_000, seed=3)
    inputs = [row.input_tokens for row in rows]
    mean = sum(inputs) / len(inputs)
    spread = (sum((n - mean) ** 2 for n in inputs) / len(inputs)) ** 0.5 / mean
    assert mean == pytest.approx(500, rel=0.05) and spread == pytest.approx(1.5, rel=0.1)
    assert {row.output_tokens for row in rows} == {50}


def test_structs_refuse_what_the_command_line_would() -> None:
    with pytest.raises(BadInput, match="--speed"):
        Traffic(speed=0.0)
    with pytest.raises(BadInput, match="--prefix-ttl"):
        EngineSetup(prefix_ttl=0.0)
    with pytest.raises(BadInput, match="--router"):
        Front("nearest", 1)


def test_blocks_of_a_record_are_no_longer_than_its_prompt() -> None:
    assert len(of_row(0, TraceRow(0, 5, 1, tuple(range(3)), 1 << 60)).prompt) == 5
    with pytest.raises(BadInput, match="--input-tokens"):
        of_row(0, TraceRow(0, 1 << 60, 1, (1, 2), 1 << 60))


def test_a_load_that_is_refused_whole_has_no_steps(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*BASE, "--input-tokens", "3000", "--max-model-len", "1000", "--rate", "1"])
    assert not ended.value.code
    assert "no step: every request was refused" in capsys.readouterr().out


def test_seeds_say_how_much_a_figure_is_the_draw(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--rate", "20", *SHORT]
    found = simulated(capsys, *load, "--seed", "3", "--seeds", "7")["seeds"]
    alone = [simulated(capsys, *load, "--seed", str(seed))["ttft_ms"]["mean"] for seed in range(3, 10)]
    said = found["ttft_ms"]["mean"]
    assert found["seeds"] == [3, 4, 5, 6, 7, 8, 9]
    assert (said["least"], said["median"], said["most"]) == (min(alone), sorted(alone)[3], max(alone))
    low, high = said["ci95"]
    assert said["least"] <= low < said["median"] < high <= said["most"]
    assert found["ttft_ms"]["p99"] is None, "30 requests have no p99"
    assert simulated(capsys, *load, "--seeds", "5")["seeds"]["tpot_ms"]["mean"]["ci95"] is None, "five hold no interval"
    with pytest.raises(SystemExit):
        main([*BASE, *load, "--seeds", "6"])
    assert "Over 6 seeds" in capsys.readouterr().out
