"""Fits the constants of the calibrated planner on measured runs, validates them on runs left out, and writes both down.

    python benchmarks/fit_planner.py TABLE.csv              refit, rewrite calibration.json and docs/accuracy-planner.md
    python benchmarks/fit_planner.py TABLE.csv --check      print the left-out errors of the current code, write nothing

The fit is a penalised robust regression on predicted/measured - 1, the error that is reported: Student-t residuals
(runs far off lose their vote), Gauss-Newton steps, and a normal prior on every offset of every constant
(`headway/roofline/constants.py`), so evidence is shared between engines and chips and thin evidence stays near the
typical value. TTFT's own constants are fitted after it, the others fixed. Validation leaves out whole groups: model,
system and backend together, models of one shape counted as one model, so that no copy or replicate of a left-out run is
in the fit.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from headway.plan.runs import Run, read_runs
from headway.roofline.calibrate import (
    FILE,
    METRICS,
    Calibration,
    Region,
    group_of,
    spread_class,
)
from headway.roofline.constants import CONSTANTS, FIRST_TOKEN, LEVEL_SCALE, Constant, family, labels, typical
from headway.roofline.deployment import Columns, quantities
from headway.roofline.loop import Loop
from planner_report import report

SIGMA = 0.07  # scale of the residuals the likelihood expects; smaller trusts the runs more and the priors less
TAILS = 4.0  # degrees of freedom of the Student-t: runs far off lose their vote
LEVEL_SPREAD = 0.3  # prior spread of a level's offset, for a constant whose common offset has 0.3
RECIPE_SPREAD = 0.4
FULL, WARM = 30, 6  # Gauss-Newton steps from the prior, and from the fit on all runs
STEP = 1e-4  # of the finite differences
DOCUMENT = Path(__file__).parents[1] / "docs" / "accuracy-planner.md"


class Problem:
    """The offsets of some constants as one vector, for fixed runs."""

    def __init__(self, runs: Sequence[Run], constants: Sequence[Constant]) -> None:
        deployments = [run.deployment for run in runs]
        self.constants = constants
        self.columns = quantities(deployments)
        self.typical = {c.name: typical(c, deployments) for c in constants}
        names = labels(deployments)
        self.keys: list[tuple[str, str]] = []
        spreads: list[float] = []
        masks: list[np.ndarray] = []
        for constant in constants:
            if constant.spread:
                self.keys.append((constant.name, ""))
                spreads.append(constant.spread)
                masks.append(np.ones(len(runs)))
            for level in constant.levels:
                for label in sorted(set(names[level]) - {""}):
                    self.keys.append((constant.name, label))
                    spreads.append(level_spread(constant, level))
                    masks.append(np.array([name == label for name in names[level]], float))
        self.spread, self.masks = np.array(spreads), np.array(masks)

    def values(self, theta: np.ndarray, rows: np.ndarray, nudge: Mapping[str, float] | None = None) -> Columns:
        """Every constant for some runs, the sums of offsets of some of them nudged."""
        found = {}
        for constant in self.constants:
            mine = [i for i, (name, _) in enumerate(self.keys) if name == constant.name]
            total = theta[mine] @ self.masks[mine][:, rows] + (nudge or {}).get(constant.name, 0.0)
            found[constant.name] = constant.value(self.typical[constant.name][rows], total)
        return found

    def offsets(self, theta: np.ndarray) -> dict[str, dict[str, float]]:
        """The vector as `calibration.json` holds it."""
        table: dict[str, dict[str, float]] = {constant.name: {} for constant in self.constants}
        for (name, label), value in zip(self.keys, theta, strict=True):
            table[name][label] = round(float(value), 5)
        return table


def level_spread(constant: Constant, level: str) -> float:
    if level == "recipe":
        return RECIPE_SPREAD
    return LEVEL_SPREAD * LEVEL_SCALE.get(level, 1.0) * (constant.spread / 0.3) ** 0.5


def fit(
    problem: Problem,
    metric: str,
    measured: np.ndarray,
    rows: np.ndarray,
    start: np.ndarray,
    steps: int,
    fixed: Columns,
) -> np.ndarray:
    """The offsets that make `rows` most likely: damped Gauss-Newton on the penalised Student-t likelihood.

    `fixed`: the constants that are not fitted.
    """
    columns = {name: column[rows] for name, column in problem.columns.items()}
    others = {name: column[rows] for name, column in fixed.items()}
    target = measured[rows]

    def predict(values: Columns) -> np.ndarray:
        return np.log(Loop(columns, others | values).solve()[metric])

    def off(logs: np.ndarray) -> np.ndarray:
        return np.exp(logs) / target - 1

    def cost(residual: np.ndarray, theta: np.ndarray) -> float:
        tails = np.log1p((residual / SIGMA) ** 2 / TAILS).sum() * (TAILS + 1) / 2
        return float(tails + ((theta / problem.spread) ** 2).sum() / 2)

    theta, damping = start.copy(), 1e-3
    logs = predict(problem.values(theta, rows))
    best = cost(off(logs), theta)
    for _ in range(steps):
        residual = off(logs)
        slope = _slopes(problem, theta, rows, predict, logs) * (residual + 1)
        weight = (TAILS + 1) / (TAILS + (residual / SIGMA) ** 2) / SIGMA**2
        curvature = (slope * weight) @ slope.T + np.diag(problem.spread**-2)
        gradient = slope @ (weight * residual) + theta / problem.spread**2
        before = best
        for _ in range(6):
            move = -np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
            trial = theta + np.clip(move, -0.5, 0.5)
            moved = predict(problem.values(trial, rows))
            found = cost(off(moved), trial)
            if found < best:
                theta, logs, best, damping = trial, moved, found, max(damping / 5, 1e-6)
                break
            damping *= 8
        if before - best < 1e-4 * abs(best):
            break
    return theta


def _slopes(
    problem: Problem,
    theta: np.ndarray,
    rows: np.ndarray,
    predict: Callable[[Columns], np.ndarray],
    here: np.ndarray,
) -> np.ndarray:
    """d log(prediction) / d offset, one row per offset: all levels of a constant share its derivative."""
    change = {}
    for constant in problem.constants:
        nudged = problem.values(theta, rows, {constant.name: STEP})
        change[constant.name] = (predict(nudged) - here) / STEP
    return np.array([change[name] * mask[rows] for (name, _), mask in zip(problem.keys, problem.masks, strict=True)])


class Fitter:
    """Both fits on any subset of the runs."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.token = Problem(runs, CONSTANTS)
        self.first = Problem(runs, FIRST_TOKEN)
        self.measured = {metric: np.array([getattr(run, metric) for run in runs]) for metric in METRICS}
        self.all = np.arange(len(runs))
        self.distinct = distinct(runs)
        self.typical_first = self.first.values(np.zeros(len(self.first.keys)), self.all)
        self.best = np.zeros(len(self.token.keys)), np.zeros(len(self.first.keys))
        self.best = self.fit(self.all, FULL)

    def fit(self, rows: np.ndarray, steps: int = WARM) -> tuple[np.ndarray, np.ndarray]:
        """The offsets fitted on some of the runs, from the best known ones. Copies of a run count once."""
        rows = np.intersect1d(rows, self.distinct)
        times = self.measured
        token = fit(self.token, "tpot", times["tpot"], rows, self.best[0], steps, self.typical_first)
        fixed = self.token.values(token, self.all)
        return token, fit(self.first, "ttft", times["ttft"], rows, self.best[1], steps, fixed)

    def predict(self, theta: tuple[np.ndarray, np.ndarray], rows: np.ndarray) -> Columns:
        columns = {name: column[rows] for name, column in self.token.columns.items()}
        constants = self.token.values(theta[0], rows) | self.first.values(theta[1], rows)
        solved = Loop(columns, constants).solve()
        return {metric: solved[metric] for metric in METRICS}

    def left_out(self, folds: Sequence[object]) -> Columns:
        """Predictions of every run by a fit without its fold."""
        found = {metric: np.zeros(len(self.runs)) for metric in METRICS}
        for fold in sorted(set(folds), key=str):
            out = np.array([one == fold for one in folds])
            predicted = self.predict(self.fit(self.all[~out]), self.all[out])
            for metric in METRICS:
                found[metric][out] = predicted[metric]
        return found


def distinct(runs: Sequence[Run]) -> np.ndarray:
    """The first of every measurement: the exports overlap, and a copy is no further evidence."""
    seen: dict[tuple[object, ...], int] = {}
    for index, run in enumerate(runs):
        seen.setdefault((run.system, configuration(run), run.tpot, run.ttft), index)
    return np.array(sorted(seen.values()))


def configuration(run: Run) -> tuple[object, ...]:
    """What was run, without the name of the checkpoint."""
    d = run.deployment
    return (
        d.shape.params, run.system, d.engine, d.precision, d.gpus, d.attention_dp, d.expert_parallel,
        d.concurrency, d.prompt, d.output, d.disaggregated, d.speculation,
    )  # fmt: skip


def group_folds(runs: Sequence[Run]) -> list[str]:
    """Model, system and backend; models of one shape are one model."""
    return [f"{run.deployment.shape.params} {run.system} {run.backend}" for run in runs]


def configuration_folds(runs: Sequence[Run], parts: int = 5) -> list[int]:
    """Random parts of the configurations, whose replicates stay together."""
    return [int(hashlib.sha256(repr(configuration(run)[:-2]).encode()).hexdigest(), 16) % parts for run in runs]


def spreads(fitter: Fitter, new: Columns, seen: Columns) -> dict[str, dict[str, tuple[float, float]]]:
    """10th and 90th percentiles of log(measured/predicted) per class: runs of new groups, and of groups in the fit."""
    table: dict[str, dict[str, tuple[float, float]]] = {metric: {} for metric in METRICS}
    for metric in METRICS:
        for predicted, known in ((new, False), (seen, True)):
            residual = np.log(fitter.measured[metric] / predicted[metric])
            classes = [spread_class(run.deployment, known) for run in fitter.runs]
            for name in sorted(set(classes)):
                mine = residual[[one == name for one in classes]]
                low, high = np.quantile(mine, (0.1, 0.9))
                table[metric][name] = (round(float(low), 4), round(float(high), 4))
    return table


def region(runs: Sequence[Run]) -> Region:
    """Where the fitted runs were, a factor of two beyond the ends for the continuous ones."""

    def ends(values: Iterable[float]) -> tuple[float, float]:
        listed = list(values)
        return max(1.0, min(listed) / 2), max(listed) * 2

    deployments = [run.deployment for run in runs]
    return Region(
        engines=tuple(sorted({d.engine for d in deployments})),
        families=tuple(sorted({family(d.hardware.name) for d in deployments})),
        precisions=tuple(sorted({f"{d.precision} {family(d.hardware.name)}" for d in deployments})),
        prompt=ends(d.prompt for d in deployments),
        output=ends(d.output for d in deployments),
        concurrency=ends(d.concurrency for d in deployments),
        gpus=(1, max(d.gpus for d in deployments)),
        groups=tuple(sorted({group_of(d) for d in deployments})),
    )


def validate(runs: Sequence[Run]) -> tuple[dict[str, Fitter], dict[str, Columns], dict[str, Columns]]:
    """Per kind of model: the fit on all runs, predictions with the run's group left out, and with a fifth of the
    configurations of every group left out."""
    fitters, new, seen = {}, {}, {}
    for kind in ("dense", "moe"):
        mine = [run for run in runs if run.deployment.kind == kind]
        fitters[kind] = fitter = Fitter(mine)
        new[kind] = fitter.left_out(group_folds(mine))
        seen[kind] = fitter.left_out(configuration_folds(mine))
        print(f"{kind}: {len(mine)} runs, {len(set(group_folds(mine)))} groups", flush=True)
    return fitters, new, seen


def calibrated(
    table: Path, fitters: dict[str, Fitter], new: dict[str, Columns], seen: dict[str, Columns]
) -> Calibration:
    """Everything `calibration.json` holds."""
    spread: dict[str, dict[str, tuple[float, float]]] = {metric: {} for metric in METRICS}
    for kind, fitter in fitters.items():
        for metric, classes in spreads(fitter, new[kind], seen[kind]).items():
            spread[metric] |= classes
    runs = [run for fitter in fitters.values() for run in fitter.runs]
    return Calibration(
        source={
            "runs": f"{len(runs)} measured serving runs",
            "origin": "ai-dynamo/aiconfigurator, silicon runs, Apache-2.0",
            "sha256": hashlib.sha256(table.read_bytes()).hexdigest(),
            "written_by": "benchmarks/fit_planner.py",
        },
        offsets={
            kind: fitter.token.offsets(fitter.best[0]) | fitter.first.offsets(fitter.best[1])
            for kind, fitter in fitters.items()
        },
        spread=spread,
        region=region(runs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--check", action="store_true", help="print the errors, write nothing")
    options = parser.parse_args()
    runs = [run for run in read_runs(options.table)[0] if run.deployment.fits and not run.doubt]
    fitters, new, seen = validate(runs)
    found = calibrated(options.table, fitters, new, seen)
    text = report(options.table, found, {kind: fitter.runs for kind, fitter in fitters.items()}, new)
    print(text)
    if not options.check:
        FILE.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
        DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
