"""The accuracy page of the planner, `docs/accuracy-planner.md`, as `fit_planner.py` writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headway.plan.answers_lists import Errors
from headway.plan.runs import PublicRun
from headway.plan.score import score
from headway.roofline.calibrate import FITTED, Calibration
from headway.roofline.constants import CONSTANTS, FIRST_TOKEN, Constant
from headway.roofline.residual import Correction
from headway.roofline.served import METRICS

if TYPE_CHECKING:
    from fit_planner import LeftOut

HEADER = """# How accurate the planner is

Written by `python benchmarks/fit_planner.py benchmarks/data/silicon_runs.csv.gz`; do not edit. Errors are
predicted/measured - 1 on {runs} (TTFT, TPOT) of TensorRT-LLM, SGLang and vLLM, H100 to GB300.

*Left out*: runs that were in no fit that predicts them: neither of the constants, nor of the smooth correction
(`src/headway/roofline/residual.py`), nor of how far that reaches. *Runs*: a quarter of the measurements with their
copies; *group*: all runs of a fifth of the groups (model, system, engine and precision; models of one shape are one
model); *cell*: the same of an engine on a precision and family of devices; else all runs of a system or a model. *By
physics alone*: without the correction. *In p10-p90* is the share of runs inside the range that the **other** folds
give: errors over the deviation that the correction expects, cut where 78 % of what was left out is held, near 10 % at
either end, less where few models or systems say little about another. *Committed fit*: what ships, on the runs it was
fitted on.

Which range an estimate gets depends on the first of these that no run had: its cell, its model, its system, its group,
or none, and on how near measured runs are.

What the runs do not say limits it. Six in seven disaggregated DeepSeek runs name neither their decode workers nor
whether drafts were used; public recipes of the same description (`src/headway/plan/recipes.py`) say it for most of
them. Where several fit, or none, it stays unknown: such runs may differ by a factor of 1.9, so no estimate can be near
all. Where nothing is said of the prefill workers, they are taken as never too few. Rows with a load that no recipe of
the run came near (512 requests in flight, recipes go to 64, and tokens as quick as with 8) are abstained from. The
conventions that fill further gaps are in `src/headway/plan/runs.py`. TTFT depends on how the load was started,
which no row says; its range is as wide as that.
"""
ABSTAINED = "Rows the model abstains from, scored by their bound (which is a bound, not an estimate):"


def report(
    table: Path,
    found: Calibration,
    corrections: Mapping[str, Correction],
    runs: Mapping[str, Sequence[PublicRun]],
    validated: Mapping[str, Sequence[LeftOut]],
) -> str:
    """The accuracy page: left-out errors and errors of the committed fit, overall, by group, and the constants."""
    committed = score(table, known=found, corrections=corrections)
    lines = [HEADER.format(runs=found.source["runs"])]
    lines.append("| what | runs | mean | median | bias | in p10-p90 | abstained |\n|---|---|---|---|---|---|---|")
    for metric in METRICS:
        for kind, mine in runs.items():
            for left in validated[kind]:
                lines += left_out_rows(metric, kind, mine, left)
            lines.append(row_of(f"{metric.upper()}, {kind}, committed fit", getattr(committed, metric)[kind]))
    lines.append(f"\n{ABSTAINED}\n\n| reason | rows |\n|---|---|")
    lines += [f"| {reason} | {count} |" for reason, count in committed.abstained.reasons.items()]
    lines.append("\n## By group, TPOT with the group left out\n")
    lines.append(
        "| model | system | engine | runs | mean | median | bias | committed fit |\n|---|---|---|---|---|---|---|---|"
    )
    fitted = {(g.model, g.system, g.backend): g.mape for g in committed.groups}
    for kind, mine in runs.items():
        new = next(left.predicted for left in validated[kind] if left.new == "group")
        for name, rows in groups_of(mine).items():
            error = new["tpot"][rows] / np.array([mine[row].tpot for row in rows]) - 1
            mean, median, bias = np.abs(error).mean(), np.median(np.abs(error)), error.mean()
            figures = f"{100 * mean:.1f} | {100 * median:.1f} | {100 * bias:+.1f}"
            lines.append(f"| {' | '.join(name)} | {len(rows)} | {figures} | {fitted[name]:.1f} |")
    lines.append("\n## Constants\n\nCommon value, and the factor of each level that moved it by more than 10 %.\n")
    lines.append("| constant | meaning | dense | mixtures |\n|---|---|---|---|")
    lines += [constant_row(constant, found) for constant in CONSTANTS + FIRST_TOKEN]
    return "\n".join(lines) + "\n"


def left_out_rows(metric: str, kind: str, runs: Sequence[PublicRun], left: LeftOut) -> list[str]:
    """The left-out errors, and those of aggregated and disaggregated runs apart for a kind that has many of both."""
    error, bare = (left.predicted[name] / left.measured[metric] - 1 for name in (metric, f"physics_{metric}"))
    held, apart = left.held(metric, left.tail(metric)), np.array([run.deployment.disaggregated for run in runs])
    name = f"{metric.upper()}, {kind}, {'runs' if left.new == FITTED else left.new} left out"
    rows = [row_of(name, errors_of(error, held))]
    if left.new in (FITTED, "group"):
        if apart.mean() > 0.05:
            parts = {"aggregated": ~apart, "disaggregated": apart}
            rows += [row_of(f"- of which {part}", errors_of(error[mine], held[mine])) for part, mine in parts.items()]
        rows.append(row_of("- by physics alone", errors_of(bare)))
    return rows


def errors_of(error: np.ndarray, held: np.ndarray | None = None) -> Errors:
    """Of predictions; `held`: were they in their ranges?"""
    mean, median, bias = (100 * float(x) for x in (np.abs(error).mean(), np.median(np.abs(error)), error.mean()))
    return Errors(len(error), mean, median, bias, None if held is None else 100 * float(held.mean()), 0.0)


def row_of(name: str, entry: Errors) -> str:
    cells = [entry.mape, entry.median, entry.bias, entry.coverage, entry.abstained]
    return f"| {name} | {entry.n} | " + " | ".join("-" if cell is None else f"{cell:.1f} %" for cell in cells) + " |"


def groups_of(runs: Sequence[PublicRun]) -> dict[tuple[str, str, str], list[int]]:
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
