"""Constants that ship have been scored: whoever changes them, or the page about them, scores them again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from headway.plan.score import score
from headway.roofline.calibrate import FILE

ROOT = Path(__file__).parent.parent
SCORES = json.loads((ROOT / "benchmarks" / "data" / "scores.json").read_text())
BARS = {"ttft": 15.0, "tpot": 3.0, "e2e": 5.0}  # per cent, of the mean
AGAIN = "run benchmarks/fit_planner.py and benchmarks/scores.py, and commit what they write"


def sha256(path: Path) -> str:
    from hashlib import sha256

    return sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("name", "path"), [("calibration", FILE), ("planner_page", ROOT / "docs" / "accuracy-planner.md")]
)
def test_the_committed_scores_are_of_what_ships(name: str, path: Path) -> None:
    assert SCORES[name] == sha256(path), f"{path.name} has changed since it was scored: {AGAIN}"


@pytest.mark.parametrize("metric", list(BARS))
def test_simulated_runs_are_within_their_bars(metric: str) -> None:
    assert len(SCORES["simulator"]) >= 2
    for run, errors in SCORES["simulator"].items():
        assert abs(errors[metric]["mean"]) <= BARS[metric], run


def test_the_page_about_the_simulator_says_what_was_scored() -> None:
    page = (ROOT / "docs" / "accuracy-simulator.md").read_text()
    told = [float(value) for value in re.findall(r"\| (?:TTFT|TPOT|E2E) \|[^|]*\|[^|]*\| ([+-][\d.]+) % \|", page)]
    scored = [errors[metric]["mean"] for errors in SCORES["simulator"].values() for metric in BARS]
    assert sorted(told) == pytest.approx(sorted(scored), abs=0.06)


def test_the_planners_figures_are_those_of_the_constants() -> None:
    found = score(ROOT / "benchmarks" / "data" / "silicon_runs.csv.gz")
    for metric in ("tpot", "ttft"):
        for kind, errors in getattr(found, metric).items():
            assert errors.mape == pytest.approx(SCORES["planner"][metric][kind]["mape"], rel=1e-3), AGAIN
