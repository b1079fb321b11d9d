"""benchmarks/cpu.py: what it makes of its measurements, and its engines' processes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import pairs as by_pairs  # noqa: E402
from peers import bars, engines  # noqa: E402

FACTS = {"bytes": 1e9, "cache": 1e4, "body": 1e9, "head": 1e8, "math": "int8"}


def run(rate: float, before: float = 34, after: float = 34, **more: float) -> dict[str, Any]:
    return {"rate": rate, "gb_s": [before, after], **more}


def measured(peers: dict[str, Any], kernels: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    runs = kernels or [run(60.0, attention=1e-3)]
    engine = [run(50.0, host=4e-4)]
    return {"facts": FACTS, "operations_per_s": 9e11, "kernels": runs, "engine": engine, "peers": peers}


def pairs(*rates: tuple[float, float]) -> dict[str, Any]:
    return {"engine": "some 1.0", "ours": [run(a) for a, _ in rates], "runs": [run(b) for _, b in rates]}


def rows(model: str, point: str, one: dict[str, Any]) -> dict[str, dict[str, Any]]:
    report = {"models": {model: {point: one}}, "checks": {}}
    return {row["name"].removeprefix(f"{model}, "): row for row in bars.comparisons(report)}


def test_the_peer_that_counts_is_the_one_we_are_least_ahead_of() -> None:
    peers = {
        "llama.cpp Q4_0": pairs((60, 40)),
        "openvino int4": pairs((50, 30)),
        "vllm w8a8": pairs((50, 45)),
    }
    found = rows("1b-int4", "decode 8", measured(peers))
    four, every = found["decode 8, against int4"], found["decode 8, against any format"]
    assert (four["best_peer"], four["ratio"], four["bar"], four["met"]) == ("llama.cpp Q4_0", 1.5, 1.8, False)
    assert (every["best_peer"], every["ratio"], every["met"], every["ours_is"]) == ("vllm w8a8", 1.111, False, "engine")


def test_pairs_that_saw_different_memory_do_not_count_if_there_are_enough_others() -> None:
    alike = [(60.0, 40.0)] * 3
    peer = pairs(*alike, (100, 40), (100, 40))
    for unlike in peer["ours"][3:]:
        unlike["gb_s"] = [58, 57]
    row = rows("1b-q4_0", "decode 1", measured({"llama.cpp": peer}))["decode 1, against the same file"]
    assert (row["ratio"], row["pairs"]) == (1.5, 3)
    few = {"engine": "some", "ours": peer["ours"][2:], "runs": peer["runs"][2:]}
    assert rows("1b-q4_0", "decode 1", measured({"llama.cpp": few}))["decode 1, against the same file"]["ratio"] == 2.5


def test_a_missing_peer_has_ratio_null_and_a_reason() -> None:
    row = rows("1b-bf16", "decode 1", measured({"vllm bf16": {"reason": "not installed"}}))["decode 1, against bf16"]
    assert (row["ours"], row["ratio"], row["met"], row["bar"]) == (None, None, None, 0.97)
    assert row["missing"] == {"vllm bf16": "not installed"}


def test_a_roof_is_the_slower_of_memory_and_arithmetic() -> None:
    one, many = bars.POINTS["decode 1"], bars.POINTS["prefill 512"]
    assert bars.roof_seconds(one, FACTS, 34e9, 9e11) == pytest.approx((1e9 + 1e4 * 128) / 34e9)
    assert bars.roof_seconds(many, FACTS, 34e9, 9e11) == pytest.approx(2 * (512e9 + 1e8) / 9e11)


def test_decode_1_has_a_bar_for_each_speed_of_memory() -> None:
    kernels = [run(31, 34, 34), run(32, 35, 35), run(33, 35, 36), run(40, 58, 58), run(90, 30, 58)]
    found = rows("1b-int8", "decode 1", measured({}, kernels))
    slow, fast = found["decode 1, share of the roof, slow memory"], found["decode 1, share of the roof, fast memory"]
    assert (slow["runs"], slow["bar"], slow["met"]) == (3, 0.9, True)
    assert (fast["runs"], fast["bar"], fast["met"]) == (1, 0.7, False)


def test_limits_are_met_from_below() -> None:
    report = {"models": {}, "checks": {"accuracy": {"mean": 0.004, "percentile_99_9": 0.04}, "demo": {"seconds": 1.5}}}
    assert [row["met"] for row in bars.comparisons(report)] == [True, False]
    memory = {"peak": 1.2e9, "anonymous": 1e9, "weights": 8e8, "cache": 2e8}
    (row,) = rows("1b-int4", "memory", memory).values()
    assert (row["ours"], row["peer"], row["met"]) == (1.2, 1.15, False)


ECHO = """
import sys
sys.path.insert(0, sys.argv[1])
from worker import serve, timed_steps

class Echo:
    def __init__(self):
        print("engines chatter")
    def facts(self):
        return {"engine": "echo"}
    def decode(self, batch, context):
        gains = iter([1, batch, 1, *[batch] * 99])
        return {"seconds": timed_steps(lambda: next(gains), batch), "context": context}
    def fail(self):
        raise RuntimeError("out of memory")

serve(Echo)
"""


def test_an_engines_process_answers_and_its_end_has_a_reason(tmp_path: Path) -> None:
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    engine = engines.Engine([sys.executable, str(script), str(BENCHMARKS / "peers")], tmp_path / "log")
    assert engine.facts == {"engine": "echo"}
    answer = engine.ask("decode", batch=4, context=128)
    assert (len(answer["seconds"]), answer["context"]) == (12, 128)
    with pytest.raises(engines.EngineFailed, match="out of memory"):
        engine.ask("fail")
    engine.close()


def test_a_peer_without_an_interpreter_says_how_to_give_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engines.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("HEADWAY_PEER_VLLM", raising=False)
    with pytest.raises(engines.EngineFailed, match="HEADWAY_PEER_VLLM"):
        engines.start_peer("vllm w8a8", tmp_path, 2, {}, tmp_path / "log")
    monkeypatch.setenv("HEADWAY_PEER_VLLM", "/some/python")
    assert engines.interpreter("vllm", {}) == "/some/python"
    assert engines.interpreter("vllm", {"vllm": "/other/python"}) == "/other/python"


def test_a_build_is_its_own_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HEADWAY_PEER_IK_LLAMA_CPP", raising=False)
    with pytest.raises(engines.EngineFailed, match="not built: set HEADWAY_PEER_IK_LLAMA_CPP"):
        engines.start_peer("ik_llama.cpp", tmp_path, 2, {}, tmp_path / "log")
    program = tmp_path / "worker"
    program.write_text('#!/bin/sh\necho "{\\"engine\\": \\"$2 threads\\"}"\n')
    program.chmod(0o755)
    engine = engines.start_peer("llama.cpp build", tmp_path, 2, {"llama.cpp-build": str(program)}, tmp_path / "log")
    assert engine.facts == {"engine": "2 threads"}
    engine.close()


def test_a_roof_counts_the_experts_that_a_step_touches() -> None:
    facts = FACTS | {"experts": {"1": 1e8, "32": 8e8}}
    one, many = bars.POINTS["decode 1"], bars.POINTS["decode 32"]
    assert bars.roof_seconds(one, facts, 34e9, 9e12) == pytest.approx((1.1e9 + 1e4 * 128) / 34e9)
    assert bars.roof_seconds(many, facts, 34e9, 9e12) == pytest.approx((1.8e9 + 1e4 * 128 * 32) / 34e9)


def test_pairs_are_compared_run_by_run_and_not_by_their_medians() -> None:
    def pair(ours: float, theirs: float) -> by_pairs.Pair:
        return {
            "ours": {"wall_ms": ours, "processor_ms": 2 * ours},
            "theirs": {"wall_ms": theirs, "processor_ms": 4 * theirs},
        }

    row = by_pairs.compared("gemma", bars.POINTS["decode 8"], [pair(10, 30), pair(40, 20), pair(20, 40)])
    assert row["wall_ratios"] == [3, 0.5, 2]
    assert (row["wall_ratio"], row["processor_ratio"]) == (2, 4)
    assert (row["ours_tokens_per_s"], row["theirs_tokens_per_s"]) == (400, 266.7)
    assert row["bar"] == 3.0


def test_the_processor_time_of_an_engine_is_all_that_it_spent(tmp_path: Path) -> None:
    program = tmp_path / "worker"
    busy = "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"
    program.write_text(f'#!/bin/sh\n{busy}\necho "{{}}"\nread line\n')
    program.chmod(0o755)
    engine = engines.start_peer("llama.cpp build", tmp_path, 2, {"llama.cpp-build": str(program)}, tmp_path / "log")
    assert by_pairs.processor_seconds(engine) > 0
    engine.close()
