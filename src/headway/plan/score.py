"""`headway plan score FILE.csv`: predicts every measured run of a table and says how far off it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from headway.plan.runs import Run, read_runs
from headway.roofline.calibrate import Calibration, Estimate, Range, calibration


def score(path: Path | str, known: Calibration | None = None) -> dict[str, Any]:
    """Errors of every prediction against a table of runs, in percent (shape of the answer: see `plan score --json`).

    Rows outside the validated region are abstained from: they count with their bound, and in `abstained`. Coverage is
    the share of the other rows inside their p10-p90 range. Rows that are no deployment at all are in `skipped`.
    """
    runs, skipped = read_runs(Path(path))
    model = known or calibration()
    estimates = model.predict_all([run.deployment for run in runs], [run.doubt for run in runs])
    kinds = {kind: [i for i, run in enumerate(runs) if run.deployment.kind == kind] for kind in ("dense", "moe")}
    result: dict[str, Any] = {
        metric: {kind: summary(metric, runs, estimates, rows) for kind, rows in kinds.items()}
        for metric in ("tpot", "ttft")
    }
    result["groups"] = _groups(runs, estimates)
    result["skipped"] = {"n": len(skipped), "reasons": _counted(entry.reason for entry in skipped)}
    result["abstained"] = {
        "n": sum(bool(estimate.reason) for estimate in estimates),
        "reasons": _counted(estimate.reason for estimate in estimates if estimate.reason),
    }
    return result


def summary(metric: str, runs: list[Run], estimates: list[Estimate], rows: list[int]) -> dict[str, Any]:
    """Errors of some rows in percent: mean and median of |predicted/measured - 1|, its signed mean, coverage."""
    if not rows:
        return {"n": 0, "mape": None, "median": None, "bias": None, "coverage": None, "abstained": 0.0}
    measured = np.array([getattr(runs[i], metric) for i in rows])
    ranges: list[Range | None] = [getattr(estimates[i], metric) for i in rows]
    bounds = [getattr(estimates[i], f"bound_{metric}") for i in rows]
    point = np.array([r.p50 if r else bound for r, bound in zip(ranges, bounds, strict=True)])
    error = point / measured - 1
    inside = [r.p10 <= value <= r.p90 for r, value in zip(ranges, measured, strict=True) if r]
    return {
        "n": len(rows),
        "mape": _percent(np.abs(error).mean()),
        "median": _percent(np.median(np.abs(error))),
        "bias": _percent(error.mean()),
        "coverage": _percent(np.mean(inside)) if inside else None,
        "abstained": _percent(1 - len(inside) / len(rows)),
    }


def _percent(share: float | np.floating) -> float:
    return round(100 * float(share), 2)


def _groups(runs: list[Run], estimates: list[Estimate]) -> list[dict[str, Any]]:
    """The same per (model, system, backend), with the kind and the TTFT error."""
    members: dict[tuple[str, str, str], list[int]] = {}
    for index, run in enumerate(runs):
        members.setdefault((run.model, run.system, run.backend), []).append(index)
    groups = []
    for (name, system, backend), rows in sorted(members.items()):
        first: dict[str, Any] = {"model": name, "system": system, "backend": backend}
        first["kind"] = runs[rows[0]].deployment.kind
        first |= summary("tpot", runs, estimates, rows)
        first["ttft_mape"] = summary("ttft", runs, estimates, rows)["mape"]
        groups.append(first)
    return groups


def _counted(reasons: Iterable[str]) -> dict[str, int]:
    return dict(Counter(reasons).most_common())
