"""A run that is scored against what made it: a folder is written from a simulation, and simulated again."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import BadInput
from headway.shape.catalogue import find_model
from headway.simulate import score as scoring
from headway.simulate.fit import Constants
from headway.simulate.measured import read_measured
from headway.simulate.score import published, score, simulate

SHAPE = find_model("meta-llama/Llama-3.1-8B")
SLOWER = {"stream": -0.1, "linear": 0.1}  # what is to be found, as logarithms


def write_run(folder: Path, requests: list[dict[str, Any]], **engine: Any) -> Path:
    meta = {"model": SHAPE.name, "engine_kwargs": {"max_num_seqs": 16, **engine}, "kv_cache": {"num_gpu_blocks": 700}}
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "config.json").write_text(json.dumps({"nodes": [{"instances": [{"hardware": "RTX4090"}]}]}))
    (folder / "requests.jsonl").write_text("".join(json.dumps(one) + "\n" for one in requests))
    with open(folder / "timeseries.csv", "w") as file:
        writer = csv.writer(file)
        writer.writerows([("t", "running", "waiting"), (1.0, 1, 0), (2.0, 1, 0)])
    return folder


def line(number: int, at: float, prompt: int, output: int, times: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)) -> Any:
    queued, scheduled, first, last = times
    return {
        "request_id": f"bench-{number}", "input_toks": prompt, "output_toks": output, "arrival_time": 5e8 + at,
        "queued_ts": 100 + queued, "scheduled_ts": 100 + scheduled, "first_token_ts": 100 + first,
        "last_token_ts": 100 + last,
    }  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty requests, played under constants that differ from the published ones."""
    path = tmp_path_factory.mktemp("run")
    asked = [(0.05 * n, 200 + 37 * n % 900, 8 + 5 * n % 40) for n in range(40)]
    blank = write_run(path, [line(n, *one) for n, one in enumerate(asked)])
    measured = read_measured(blank, SHAPE)
    constants, model = published(measured)
    seen = simulate(measured, constants.moved(SLOWER).model(model)).seen
    lines = []
    for number, one in enumerate(asked):
        it = seen[str(number)]
        lines.append(line(number, *one, (it.queued, it.queued, it.first, it.last)))
    return write_run(path, lines)


def test_the_constants_that_made_a_run_are_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "ROUNDS", 3)
    found = score(folder, SHAPE)
    assert set(found) >= {"ttft", "tpot", "e2e", "itl", "running", "waiting"}
    for metric, most in (("tpot", 1.0), ("e2e", 2.0), ("ttft", 5.0)):
        cell = found[metric]["mean"]
        assert abs(cell["error_pct"]) < most, (metric, cell)
        assert cell["error_pct"] == pytest.approx(100 * (cell["simulated"] / cell["measured"] - 1))
        assert set(found[metric]) == {"mean", "p50", "p90", "p99"}
    assert found["about"]["moved_by"]["stream"] == pytest.approx(0.905, abs=0.05)
    assert "8 requests" in found["about"]["fitted_on"]


def test_a_model_twice_as_slow_is_twice_as_slow(folder: Path) -> None:
    measured = read_measured(folder, SHAPE)
    constants, model = published(measured)
    works = simulate(measured, model).works[0]
    half = dict.fromkeys(("stream", "linear", "attention", "prefill_attention", "stream_cache"), -0.7)
    slow = constants.moved(half | {"layer": 0.7, "row": 0.7, "step": 0.7, "eager": 0.7}).model(model)
    ratios = [slow.seconds(work) / model.seconds(work) for work in works]
    assert min(ratios) > 1.9 and max(ratios) < 2.1


def test_only_what_a_deployment_has_can_be_moved() -> None:
    constants = Constants(published_efficiency(), None)
    assert {"stream_experts", "experts", "floor", "bandwidth"}.isdisjoint(constants.names(experts=False))


def published_efficiency() -> Any:
    from headway.roofline.step import Efficiency

    return Efficiency(layer=1e-5, step=1e-4)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("requests.jsonl", "{}\n", "line 1"), ("requests.jsonl", "", "no request"), ("meta.json", "[", "meta.json"),
        ("config.json", '{"nodes": [{"instances": [{"hardware": "TPU9"}]}]}', "not in the catalogue"),
        ("timeseries.csv", "a,b\n1,2\n", "columns t, running, waiting"),
    ],
)  # fmt: skip
def test_what_is_no_run_is_refused(tmp_path: Path, name: str, text: str, says: str) -> None:
    write_run(tmp_path, [line(0, 0.0, 5, 5)])
    (tmp_path / name).write_text(text)
    with pytest.raises(BadInput, match=says):
        read_measured(tmp_path, SHAPE)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"requests\.jsonl|meta\.json"):
        read_measured(tmp_path, SHAPE)
