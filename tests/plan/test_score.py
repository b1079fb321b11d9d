"""`plan score`: the table's conventions, the shape of the answer, and the gate on the committed accuracy."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest

from headway.core.errors import BadInput
from headway.plan.answers_lists import Errors
from headway.plan.runs import NEEDED, read_runs
from headway.plan.score import score

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks" / "data" / "silicon_runs.csv.gz"
PAGE = ROOT / "docs" / "accuracy-planner.md"
FIT = ROOT / "benchmarks" / "fit_planner.py"
ROW = {
    "silicon_data_source": "source_file=/bench/a.csv; silicon_concurrency=16", "backend": "vllm",
    "backend_version": "0.12.0", "model_path": "meta-llama/Llama-3.1-70B", "system": "h100_sxm", "precision": "fp8",
    "mode": "agg", "isl": "1024", "osl": "512", "batch_size": "16", "tp_size": "4", "silicon_ttft_ms": "200",
    "silicon_tpot_ms": "15",
}  # fmt: skip


def table(tmp_path: Path, *rows: dict[str, str]) -> Path:
    path = tmp_path / "runs.csv"
    fields = list(dict.fromkeys(name for row in (ROW, *rows) for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(ROW | row for row in rows)
    return path


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({}, {"gpus": 4, "attention_dp": 1, "concurrency": 16, "prompt": 1024, "cache_bytes": 2.0}),
        ({"silicon_data_source": "db-dump/x; silicon_concurrency=16"},
         {"prompt": 921.6, "output": 460.8, "cache_bytes": 1.0}),
        ({"precision": "", "system": "b200_sxm"}, {"precision": "bf16", "cache_bytes": 2.0}),
        ({"batch_size": "4", "attention_dp_size": "4", "tp_size": "1"},
         {"gpus": 4, "attention_dp": 4, "concurrency": 16}),
        # Exports that count GPUs twice.
        ({"model_path": "deepseek-ai/DeepSeek-R1", "tp_size": "64", "moe_tp_size": "8", "moe_ep_size": "8"},
         {"gpus": 8, "attention_dp": 1, "expert_parallel": 8}),
        ({"model_path": "deepseek-ai/DeepSeek-R1", "tp_size": "1", "attention_dp_size": "64", "moe_tp_size": "8",
          "moe_ep_size": "8", "batch_size": "4"}, {"gpus": 8, "attention_dp": 8, "concurrency": 256}),
        ({"model_path": "MiniMaxAI/MiniMax-M2.5", "tp_size": "2", "attention_dp_size": "2", "moe_tp_size": "1",
          "moe_ep_size": "4"}, {"gpus": 2, "attention_dp": 2, "expert_parallel": 2, "concurrency": 32}),
        ({"model_path": "deepseek-ai/DeepSeek-R1", "tp_size": "72", "moe_tp_size": "72"}, {"attention_dp": 72}),
        # Disaggregated: the load is shared by the decode workers; 0 and blank mean not said.
        ({"mode": "disagg", "decode_tp_size": "8", "decode_num_workers": "4", "batch_size": "", "tp_size": ""},
         {"gpus": 8, "concurrency": 4, "disaggregated": True, "workers": 4}),
        # All 36 GPUs of a deployment as the degree of both sides; a blank layout as one GPU.
        ({"mode": "disagg", "backend": "trtllm", "model_path": "deepseek-ai/DeepSeek-R1", "system": "gb200",
          "decode_tp_size": "36", "prefill_tp_size": "36"}, {"gpus": 8, "attention_dp": 1, "concurrency": 4}),
        ({"mode": "disagg", "model_path": "deepseek-ai/DeepSeek-R1", "system": "gb200", "decode_tp_size": "72",
          "prefill_tp_size": "72", "silicon_data_source": "db-dump/x; silicon_concurrency=4096"},
         {"gpus": 48, "attention_dp": 48, "concurrency": 4096}),
        ({"mode": "disagg", "model_path": "deepseek-ai/DeepSeek-R1", "system": "gb200", "decode_tp_size": "1"},
         {"gpus": 4, "attention_dp": 1, "concurrency": 16}),
        ({"mode": "disagg", "backend": "trtllm", "model_path": "deepseek-ai/DeepSeek-R1", "decode_tp_size": "8",
          "silicon_data_source": "db-dump/x; silicon_concurrency=4096"}, {"attention_dp": 8, "concurrency": 4096}),
        ({"mode": "disagg", "backend": "trtllm", "model_path": "deepseek-ai/DeepSeek-R1", "decode_tp_size": "8",
          "decode_num_workers": "0"}, {"attention_dp": 1, "concurrency": 4}),
        # Exports mix DeepSeek runs with and without drafts; the dump has only the latter.
        ({"model_path": "deepseek-ai/DeepSeek-R1",
          "silicon_data_source": "source_file=2026-04.csv; silicon_concurrency=4"},
         {"drafts": None}),
        ({"model_path": "deepseek-ai/DeepSeek-R1", "silicon_data_source": "db-dump/2026; silicon_concurrency=4"},
         {"drafts": 0}),
        # A public recipe of the same description: four decode workers, which draft nothing.
        ({"mode": "disagg", "backend": "trtllm", "model_path": "deepseek-ai/DeepSeek-R1", "system": "gb200",
          "precision": "fp4", "isl": "8192", "osl": "1024", "backend_version": "0.8.1.post2", "decode_tp_size": "8",
          "silicon_data_source": "source_file=2026-04.csv; silicon_concurrency=44"},
         {"gpus": 8, "concurrency": 11, "drafts": 0}),
    ],
)  # fmt: skip
def test_conventions_of_the_table(tmp_path, row, expected):
    (run,), skipped = read_runs(table(tmp_path, row))
    assert not skipped
    assert {name: getattr(run.deployment, name) for name in expected} == pytest.approx(expected)
    assert run.tpot == 0.015 and run.ttft == 0.2 and run.doubt == ""


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"model_path": "acme/unheard-of-9b"}, "model_path"),
        ({"system": "abacus"}, "system"),
        ({"precision": "fp3"}, "precision"),
        ({"silicon_tpot_ms": "0"}, "silicon_tpot_ms"),
        ({"silicon_tpot_ms": "nan"}, "silicon_tpot_ms"),
        ({"silicon_ttft_ms": "soon"}, "silicon_ttft_ms"),
        ({"isl": ""}, "isl"),
        ({"tp_size": "3"}, ""),
    ],
)
def test_a_row_that_is_no_deployment_is_skipped_with_a_reason_and_the_rest_is_scored(tmp_path, row, reason):
    found = score(table(tmp_path, row, {}))
    if reason:
        assert found.skipped.n == 1 and next(iter(found.skipped.reasons)).startswith(f"{reason}: ")
    assert found.tpot["dense"].n == (1 if reason else 2)


@pytest.mark.parametrize(
    "row",
    [
        {"system": "a100_sxm"},
        {"backend": "tgi"},
        {"tp_size": "1", "precision": ""},
        {"silicon_data_source": "source_file=/x.csv"},
    ],
)
def test_abstained_rows_are_scored_by_the_bound_and_not_covered(tmp_path, row):
    found = score(table(tmp_path, row)).tpot["dense"]
    assert (found.n, found.abstained, found.coverage) == (1, 100.0, None)
    assert found.bias != 0 and math.isfinite(found.mape)


def test_the_answer_has_the_agreed_shape(tmp_path):
    found = score(table(tmp_path, {}, {"model_path": "openai/gpt-oss-120b", "precision": "fp4", "tp_size": "2"}))
    keys = {"n", "mape", "median", "bias", "coverage", "abstained"}
    found = json.loads(msgspec.json.encode(found))
    assert all(set(found[metric][kind]) == keys for metric in ("tpot", "ttft") for kind in ("dense", "moe"))
    assert [(g["model"], g["kind"], g["n"]) for g in found["groups"]] == [
        ("meta-llama/Llama-3.1-70B", "dense", 1),
        ("openai/gpt-oss-120b", "moe", 1),
    ]
    assert {"model", "system", "backend", "n", "mape", "ttft_mape"} <= set(found["groups"][0])


def test_an_empty_table_scores_nothing(tmp_path):
    found = score(table(tmp_path))
    assert found.tpot["moe"] == Errors(0, None, None, None, None, 0.0)


def test_a_file_that_is_no_table_is_refused_by_name(tmp_path):
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    with pytest.raises(BadInput, match=f"lacks the columns {NEEDED[0]}"):
        read_runs(other)
    with pytest.raises(BadInput, match="cannot read"):
        read_runs(tmp_path / "absent.csv")


def page_rows() -> dict[str, list[float]]:
    """Name -> runs, mean, median, bias, coverage, abstained of the accuracy page's first table."""
    rows = [line.split("|")[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| T")]
    return {row[0].strip(): [float(cell.replace("%", "").replace("+", "")) for cell in row[1:]] for row in rows}


def test_the_committed_accuracy_holds():
    found, page = score(TABLE), page_rows()
    for metric in ("tpot", "ttft"):
        for kind in ("dense", "moe"):
            n, mean, median, _, coverage, abstained = page[f"{metric.upper()}, {kind}, committed fit"]
            entry = getattr(found, metric)[kind]
            assert entry.n == n
            assert entry.mape <= mean + 0.1 and entry.median <= median + 0.1, (metric, kind)
            assert entry.coverage == pytest.approx(coverage, abs=0.1)
            assert entry.abstained == pytest.approx(abstained, abs=0.1)


def test_what_search_ranks_by_is_as_near_to_measured_runs():
    found = score(TABLE, "search")
    for kind in ("dense", "moe"):
        assert found.tpot[kind].mape <= 15 and found.tpot[kind].coverage >= 70
    assert found.skipped.n == 0


def test_the_bars_hold_on_the_committed_page():
    page = page_rows()
    for kind, bar in (("dense", 12.0), ("moe", 20.0)):
        _, mean, _, _, coverage, abstained = page[f"TPOT, {kind}, committed fit"]
        assert mean <= bar and coverage >= 75 and abstained <= 5
        assert 75 <= page[f"TPOT, {kind}, runs left out"][4] <= 85  # ranges are of runs that were in no fit
        assert 75 <= page[f"TPOT, {kind}, group left out"][4] <= 85
        for new in ("model", "system", "cell"):
            assert 75 <= page[f"TPOT, {kind}, {new} left out"][4] <= 85
    assert page["TPOT, dense, group left out"][1] <= 9.5 and page["TPOT, moe, group left out"][1] <= 20.0


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The fitting script as a module."""
    monkeypatch.syspath_prepend(FIT.parent)
    spec = importlib.util.spec_from_file_location("fit_planner", FIT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["dense", pytest.param("moe", marks=pytest.mark.slow)])
def test_leaving_groups_out_still_meets_the_committed_error(kind, fit):
    runs = [run for run in read_runs(TABLE)[0] if run.deployment.kind == kind and run.deployment.fits]
    fitter = fit.Fitter([run for run in runs if not run.doubt])
    found = fitter.left_out([fit.FOLDS["group"](run) for run in fitter.runs])
    error = np.abs(found["tpot"] / fitter.measured["tpot"] - 1)
    assert 100 * error.mean() <= page_rows()[f"TPOT, {kind}, group left out"][1] + 0.3
