"""The planner beside AIConfigurator 0.12 on the same aggregated runs: `docs/planner-beside-aiconfigurator.md`.

    python benchmarks/aiconfigurator.py              # from the predictions that are kept in benchmarks/data
    python benchmarks/aiconfigurator.py --ours       # ours anew, each by fits that had no part of it (minutes)

AIConfigurator's come from `peers/with_aiconfigurator.py`, run in an environment of its own. A row is compared where
both predict it. Ours are those left out: by fits without the row's measurement, and without its whole group.
"""

from __future__ import annotations

import argparse
import csv
import gzip
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import numpy as np

from headway.plan.runs import PublicRun, read_runs
from headway.roofline.calibrate import FITTED, SEEN
from headway.roofline.served import METRICS

DATA = Path(__file__).parent / "data"
RUNS, THEIRS, OURS = (DATA / name for name in ("silicon_runs.csv.gz", "aiconfigurator.csv.gz", "left_out.csv.gz"))
DOCUMENT = Path(__file__).parents[1] / "docs" / "planner-beside-aiconfigurator.md"
HEADER = """# The planner beside AIConfigurator

Written by `python benchmarks/aiconfigurator.py`; do not edit. {n} aggregated runs of
`benchmarks/data/silicon_runs.csv.gz` that both predict, TTFT and TPOT as measured; mean of |predicted/measured - 1|.

*AIConfigurator*: version 0.12 (`pip install aiconfigurator`), each run asked for as its own table describes it: batch
per attention rank, parallelism, formats, lengths, its newest database of the engine; measured tables, and where these
lack an operation its hybrid of tables and formulas ({hybrid} runs). It cannot answer {missing} further runs
({why}).
It was fitted on kernels, not on these runs. *Headway, runs left out*: predicted by fits without the run's measurement
and its copies, but with its siblings. *Groups left out*: without any run of its model, system, engine and precision.

How much of that is calibration: *scaled* multiplies each of AIConfigurator's predictions by the median of
measured/predicted among its group's runs of the other three quarters, so that it has siblings too.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", action="store_true", help="predict ours anew")
    options = parser.parse_args()
    runs = [run for run in read_runs(RUNS)[0] if run.deployment.fits and not run.doubt]
    if options.ours:
        write_ours(runs)
    text = report(runs)
    DOCUMENT.write_text(text)
    print(text)


def write_ours(runs: Sequence[PublicRun]) -> None:
    """Milliseconds of every run by fits without it, and without its group."""
    from fit_planner import Fitter, LeftOut

    found: dict[int, dict[str, str]] = {}
    for kind in ("dense", "moe"):
        fitter = Fitter([run for run in runs if run.deployment.kind == kind])
        for new in (FITTED, "group"):
            left = LeftOut.of(fitter, new)
            for at, run in enumerate(fitter.runs):
                for metric in METRICS:
                    predicted = f"{1e3 * left.predicted[metric][at]:.6g}"
                    found.setdefault(run.row, {"row": str(run.row)})[f"{metric}_{new}"] = predicted
    with gzip.open(OURS, "wt", newline="") as file:
        writer = csv.DictWriter(file, ["row", *(f"{metric}_{new}" for new in (FITTED, "group") for metric in METRICS)])
        writer.writeheader()
        writer.writerows(found[row] for row in sorted(found))


def read(path: Path) -> dict[int, dict[str, str]]:
    with gzip.open(path, "rt", newline="") as file:
        return {int(row["row"]): row for row in csv.DictReader(file)}


class Compared:
    """Runs both predict: `predicted[who][metric]` and `measured[metric]`, in milliseconds."""

    def __init__(self, runs: Sequence[PublicRun]) -> None:
        ours, theirs = read(OURS), read(THEIRS)
        self.runs = [
            run for run in runs
            if not run.deployment.disaggregated and run.row in ours and theirs.get(run.row, {}).get("tpot_ms")
        ]  # fmt: skip
        self.modes = [theirs[run.row]["mode"] for run in self.runs]
        self.missing = [
            theirs[run.row]["reason"] for run in runs
            if not run.deployment.disaggregated and run.row in theirs and not theirs[run.row]["tpot_ms"]
        ]  # fmt: skip
        self.measured = {metric: np.array([1e3 * getattr(run, metric) for run in self.runs]) for metric in METRICS}
        table = {
            "AIConfigurator": (theirs, "{}_ms"), "Headway, runs left out": (ours, f"{{}}_{FITTED}"),
            "Headway, groups left out": (ours, "{}_group"),
        }  # fmt: skip
        self.predicted = {
            who: {metric: np.array([float(rows[run.row][column.format(metric)]) for run in self.runs])
                  for metric in METRICS}
            for who, (rows, column) in table.items()
        }  # fmt: skip
        self.predicted["AIConfigurator, scaled"] = {metric: self._scaled(metric) for metric in METRICS}

    def _scaled(self, metric: str) -> np.ndarray:
        """AIConfigurator's by the median ratio of the group's runs in the other quarters; as it is where there are
        none."""
        from fit_planner import FOLDS

        groups = [SEEN["group"](run.deployment) for run in self.runs]
        folds: list[Hashable] = [FOLDS[FITTED](run) for run in self.runs]
        base = self.predicted["AIConfigurator"][metric]
        ratio = self.measured[metric] / base
        scaled = base.copy()
        for at, (group, fold) in enumerate(zip(groups, folds, strict=True)):
            others = [ratio[i] for i in range(len(groups)) if groups[i] == group and folds[i] != fold]
            scaled[at] *= np.median(others) if others else 1.0
        return scaled

    def error(self, who: str, metric: str, rows: Sequence[int]) -> float:
        """Mean absolute error of some rows, percent."""
        chosen = np.array(rows, int)
        return 100 * float(np.abs(self.predicted[who][metric][chosen] / self.measured[metric][chosen] - 1).mean())


WHO = ("Headway, runs left out", "Headway, groups left out", "AIConfigurator", "AIConfigurator, scaled")


def report(runs: Sequence[PublicRun]) -> str:
    found = Compared(runs)
    why = ", ".join(
        f"{sum(reason.split(':')[0].strip(chr(34)) == name for reason in found.missing)} {said}"
        for name, said in (("RuntimeError", "it holds to be too large for their memory"),
                           ("AssertionError", "with heads that do not divide"),
                           ("ValueError", "whose experts are spread otherwise than it allows"))
    )  # fmt: skip
    lines = [HEADER.format(
        n=len(found.runs), hybrid=found.modes.count("HYBRID"), missing=len(found.missing), why=why,
    ), "| | runs | " + " | ".join(WHO) + " |", "|---|---|" + "---|" * len(WHO)]  # fmt: skip
    kinds: dict[str, Callable[[PublicRun], bool]] = {
        "dense": lambda run: run.deployment.kind == "dense", "moe": lambda run: run.deployment.kind == "moe",
    }  # fmt: skip
    engines = sorted({run.backend for run in found.runs})
    for metric in METRICS:
        for kind, belongs in kinds.items():
            for engine in ("", *engines):
                rows = [i for i, run in enumerate(found.runs) if belongs(run) and engine in ("", run.backend)]
                if rows:
                    name = f"{metric.upper()}, {kind}{', ' + engine if engine else ''}"
                    lines.append(row_of(name, [found.error(who, metric, rows) for who in WHO], len(rows)))
    lines += ["\n## TPOT by group\n", "Groups where AIConfigurator is nearer are marked.\n"]
    lines += ["| model | system | engine | runs | " + " | ".join(WHO) + " | |", "|---|---|---|---|" + "---|" * 5]
    groups: dict[tuple[str, str, str], list[int]] = {}
    for at, run in enumerate(found.runs):
        groups.setdefault((run.model, run.system, run.backend), []).append(at)
    for group, rows in sorted(groups.items()):
        errors = [found.error(who, "tpot", rows) for who in WHO]
        mark = "nearer" if errors[2] < errors[0] else ""
        lines.append(row_of(" | ".join(group), errors, len(rows)) + f" {mark} |")
    return "\n".join(lines) + "\n"


def row_of(name: str, errors: Sequence[float], n: int) -> str:
    return f"| {name} | {n} | " + " | ".join(f"{error:.1f} %" for error in errors) + " |"


if __name__ == "__main__":
    main()
