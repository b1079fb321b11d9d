"""What the constants that ship are worth, committed beside them: scores of two vLLM runs, and of all measured runs.

    python benchmarks/scores.py FOLDER_OF_VLLM_RUNS        writes benchmarks/data/scores.json

Whoever changes `calibration.json` runs `fit_planner.py` (which writes docs/accuracy-planner.md) and this: a test fails
while the scores are of other constants, or the page is not the one that was scored.
"""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

import msgspec

from headway.engine.references import load_shape
from headway.plan.score import score as planner_score
from headway.roofline.calibrate import FILE
from headway.simulate.measured import model_named
from headway.simulate.score import score as simulator_score

DATA = Path(__file__).with_name("data")
SCORES = DATA / "scores.json"
PAGE = Path(__file__).parent.parent / "docs" / "accuracy-planner.md"
METRICS = ("ttft", "tpot", "e2e", "itl")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def simulated(run: Path) -> dict[str, Any]:
    """Signed errors of one run, in per cent, by metric and figure."""
    found = simulator_score(run, load_shape(model_named(run)))
    return {
        metric: {name: round(one["error_pct"], 2) for name, one in found[metric].items()} for metric in METRICS
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder of folders as `headway simulate score` takes them")
    args = parser.parse_args()
    planner = planner_score(DATA / "silicon_runs.csv.gz")
    scores = {
        "calibration": digest(FILE),
        "planner_page": digest(PAGE),
        "planner": msgspec.to_builtins({"tpot": planner.tpot, "ttft": planner.ttft}),
        "simulator": {run.name: simulated(run) for run in sorted(args.runs.iterdir()) if (run / "meta.json").is_file()},
    }
    SCORES.write_bytes(msgspec.json.format(msgspec.json.encode(scores)) + b"\n")
    print(SCORES.read_text())


if __name__ == "__main__":
    main()
