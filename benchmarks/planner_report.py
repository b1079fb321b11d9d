"""The accuracy page of the planner, `docs/accuracy-planner.md`, as `fit_planner.py` writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from headway.plan.answers import Errors
from headway.plan.runs import Run
from headway.plan.score import errors, score
from headway.roofline.calibrate import METRICS, Calibration, Estimate, Range, spread_class
from headway.roofline.constants import CONSTANTS, FIRST_TOKEN, Constant
from headway.roofline.deployment import Columns

HEADER = """# How accurate the planner is

Written by `python benchmarks/fit_planner.py benchmarks/data/silicon_runs.csv.gz`; do not edit. Errors are
predicted/measured - 1 on {runs} (TTFT, TPOT) of TensorRT-LLM, SGLang and vLLM, H100 to GB300.

*Group left out*: the constants were fitted without any run of that model, system and engine (models of one shape are
one model), and the p10-p90 range is the one a new group gets. *Committed fit*: the constants that ship, on the runs
they were fitted on, and the ranges of fitted groups, which come from configurations left out.

The ranges are the 10th and 90th percentiles of these left-out errors, so new groups are covered to 80 % by
construction; the check is the other line, and runs that were kept back.

What the runs do not say limits it. Six in seven disaggregated DeepSeek runs name neither their decode workers nor
whether drafts were used: two runs with equal descriptions differ by a factor of 1.9, so no estimate can be near both.
The conventions that fill such gaps are in `src/headway/plan/runs.py`. TTFT depends on how the load was started, which
no row says; its range is as wide as that.
"""
ABSTAINED = "Rows the model abstains from, scored by their bound (which is a bound, not an estimate):"


def report(table: Path, found: Calibration, runs: Mapping[str, Sequence[Run]], new: Mapping[str, Columns]) -> str:
    """The accuracy page: left-out errors and errors of the committed fit, overall, by group, and the constants."""
    committed = score(table, found)
    lines = [HEADER.format(runs=found.source["runs"])]
    lines.append("| what | runs | mean | median | bias | in p10-p90 | abstained |\n|---|---|---|---|---|---|---|")
    for metric in METRICS:
        for kind, mine in runs.items():
            entry = left_out_summary(metric, found, mine, new[kind], list(range(len(mine))))
            lines.append(row_of(f"{metric.upper()}, {kind}, group left out", entry))
            lines += split_rows(metric, found, mine, new[kind])
            lines.append(row_of(f"{metric.upper()}, {kind}, committed fit", getattr(committed, metric)[kind]))
    lines.append(f"\n{ABSTAINED}\n\n| reason | rows |\n|---|---|")
    lines += [f"| {reason} | {count} |" for reason, count in committed.abstained.reasons.items()]
    lines.append("\n## By group, TPOT with the group left out\n")
    lines.append(
        "| model | system | engine | runs | mean | median | bias | committed fit |\n|---|---|---|---|---|---|---|---|"
    )
    fitted = {(g.model, g.system, g.backend): g.mape for g in committed.groups}
    for kind, mine in runs.items():
        for name, rows in groups_of(mine).items():
            error = new[kind]["tpot"][rows] / np.array([mine[row].tpot for row in rows]) - 1
            mean, median, bias = np.abs(error).mean(), np.median(np.abs(error)), error.mean()
            figures = f"{100 * mean:.1f} | {100 * median:.1f} | {100 * bias:+.1f}"
            lines.append(f"| {' | '.join(name)} | {len(rows)} | {figures} | {fitted[name]:.1f} |")
    lines.append("\n## Constants\n\nCommon value, and the factor of each level that moved it by more than 10 %.\n")
    lines.append("| constant | meaning | dense | mixtures |\n|---|---|---|---|")
    lines += [constant_row(constant, found) for constant in CONSTANTS + FIRST_TOKEN]
    return "\n".join(lines) + "\n"


def split_rows(metric: str, found: Calibration, runs: Sequence[Run], new: Columns) -> list[str]:
    """The left-out errors of aggregated and disaggregated runs apart, for a kind that has many of both."""
    apart = [run.deployment.disaggregated for run in runs]
    if sum(apart) < 0.05 * len(apart):
        return []
    parts = {
        "aggregated": [i for i, one in enumerate(apart) if not one],
        "disaggregated": np.flatnonzero(apart).tolist(),
    }
    return [
        row_of(f"- of which {name}", left_out_summary(metric, found, runs, new, rows)) for name, rows in parts.items()
    ]


def left_out_summary(metric: str, found: Calibration, runs: Sequence[Run], new: Columns, rows: list[int]) -> Errors:
    """Errors with the group left out, and coverage of the range a new group gets."""
    ranges = []
    for run, value in zip(runs, new[metric], strict=True):
        low, high = found.spread[metric][spread_class(run.deployment, False)]
        ranges.append(Range(value * np.exp(low), value, value * np.exp(high)))
    estimates = [Estimate("estimate", 0.0, 0.0, tpot=one, ttft=one) for one in ranges]
    return errors(metric, list(runs), estimates, rows)


def row_of(name: str, entry: Errors) -> str:
    cells = [entry.mape, entry.median, entry.bias, entry.coverage, entry.abstained]
    return f"| {name} | {entry.n} | " + " | ".join("-" if cell is None else f"{cell:.1f} %" for cell in cells) + " |"


def groups_of(runs: Sequence[Run]) -> dict[tuple[str, str, str], list[int]]:
    """Positions of the runs of each model, system and engine."""
    members: dict[tuple[str, str, str], list[int]] = {}
    for index, run in enumerate(runs):
        members.setdefault((run.model, run.system, run.backend), []).append(index)
    return dict(sorted(members.items()))


def constant_row(constant: Constant, found: Calibration) -> str:
    """The common value ("x 1.05" where the typical one differs by number format), and the offsets that matter."""
    cells = []
    for kind in ("dense", "moe"):
        table = found.offsets[kind].get(constant.name, {})
        common = table.get("", 0.0)
        first = f"x {np.exp(common):.2f}"
        if isinstance(constant.typical, float) and constant.scale != "log":
            first = f"{constant.value(np.array(constant.typical), np.array(common)):.3g}"
        moved = [f"{label} x {np.exp(value):.2f}" for label, value in table.items() if label and abs(value) > 0.095]
        cells.append("; ".join([first, *moved]))
    return f"| {constant.name} | {constant.meaning} | {' | '.join(cells)} |"
