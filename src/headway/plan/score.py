"""`headway plan score FILE.csv`: predicts every measured run of a table and says how far off it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from headway.core.errors import BadInput
from headway.plan.answers_lists import Counted, Errors, Group, Score
from headway.plan.load import CHUNKS, curves
from headway.plan.runs import PublicRun, read_runs
from headway.roofline.calibrate import Calibration, Estimate, calibration
from headway.roofline.deployment import Deployment
from headway.roofline.residual import Correction
from headway.roofline.served import but_load
from headway.roofline.timing import Range

MODELS = ("estimate", "search")


def score(
    file: Path,
    model: str = "estimate",
    known: Calibration | None = None,
    corrections: Mapping[str, Correction] | None = None,
) -> Score:
    """Errors of every prediction against a table of runs: those of `plan estimate`, or of what `plan search` ranks by.

    Rows outside the validated region are abstained from: they count with their bound, and in `abstained`. Coverage is
    the share of the other rows inside their p10-p90 range. Rows that are no deployment at all are in `skipped`.
    """
    if model not in MODELS:
        raise BadInput("--model", f"{model!r}; accepted: {', '.join(MODELS)}")
    runs, skipped = read_runs(file)
    estimates = (known or calibration()).predict_all(
        [run.deployment for run in runs], [run.doubt for run in runs], corrections
    )
    if model == "search":
        estimates = searched([run.deployment for run in runs], estimates)
    kinds = {kind: [i for i, run in enumerate(runs) if run.deployment.kind == kind] for kind in ("dense", "moe")}
    tpot, ttft = (
        {kind: errors(metric, runs, estimates, rows) for kind, rows in kinds.items()} for metric in ("tpot", "ttft")
    )
    return Score(
        tpot=tpot, ttft=ttft, groups=_groups(runs, estimates), skipped=_counted(entry.reason for entry in skipped),
        abstained=_counted(estimate.reason for estimate in estimates if estimate.reason),
    )  # fmt: skip


def searched(deployments: Sequence[Deployment], estimates: Sequence[Estimate]) -> list[Estimate]:
    """What `plan search` holds of the same deployments, in ranges as wide as the estimates'."""
    alike: dict[Hashable, list[int]] = {}
    for index, estimate in enumerate(estimates):
        if not estimate.reason:
            alike.setdefault(but_load(deployments[index]), []).append(index)
    found = list(estimates)
    bases = curves([deployments[rows[0]] for rows in alike.values()], CHUNKS[:1])
    for curve, rows in zip(bases, alike.values(), strict=True):
        for index in rows:
            seconds = curve.closed(deployments[index].concurrency)
            ranges = {metric: getattr(estimates[index], metric).at(value) for metric, value in seconds.items()}
            found[index] = msgspec.structs.replace(estimates[index], terms={}, **ranges)
    return found


def errors(metric: str, runs: list[PublicRun], estimates: list[Estimate], rows: list[int]) -> Errors:
    """Errors of some rows."""
    if not rows:
        return Errors(0, None, None, None, None, 0.0)
    measured = np.array([getattr(runs[i], metric) for i in rows])
    ranges: list[Range | None] = [getattr(estimates[i], metric) for i in rows]
    bounds = [getattr(estimates[i], f"bound_{metric}") for i in rows]
    point = np.array([r.p50 if r else bound for r, bound in zip(ranges, bounds, strict=True)])
    error = point / measured - 1
    inside = [r.p10 <= value <= r.p90 for r, value in zip(ranges, measured, strict=True) if r]
    return Errors(
        n=len(rows), mape=_percent(np.abs(error).mean()), median=_percent(np.median(np.abs(error))),
        bias=_percent(error.mean()), coverage=_percent(np.mean(inside)) if inside else None,
        abstained=_percent(1 - len(inside) / len(rows)),
    )  # fmt: skip


def _percent(share: float | np.floating) -> float:
    return round(100 * float(share), 2)


def _groups(runs: list[PublicRun], estimates: list[Estimate]) -> list[Group]:
    members: dict[tuple[str, str, str], list[int]] = {}
    for index, run in enumerate(runs):
        members.setdefault((run.model, run.system, run.backend), []).append(index)
    return [
        Group(
            **msgspec.structs.asdict(errors("tpot", runs, estimates, rows)), model=model, system=system,
            backend=backend, kind=runs[rows[0]].deployment.kind,
            ttft_mape=errors("ttft", runs, estimates, rows).mape,
        )
        for (model, system, backend), rows in sorted(members.items())
    ]  # fmt: skip


def _counted(reasons: Iterable[str]) -> Counted:
    found = Counter(reasons)
    return Counted(found.total(), dict(found.most_common()))
