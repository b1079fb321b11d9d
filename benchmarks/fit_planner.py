"""Fits the constants of the calibrated planner on measured runs, validates them on runs left out, and writes both down.

    python benchmarks/fit_planner.py TABLE.csv              refit, rewrite calibration.json and docs/accuracy-planner.md
    python benchmarks/fit_planner.py TABLE.csv --check      print the left-out errors of the current code, write nothing

The fit is a penalised robust regression on predicted/measured - 1, the error that is reported: Student-t residuals
(runs far off lose their vote), Gauss-Newton steps, and a normal prior on every offset of every constant
(`headway/roofline/constants.py`), so evidence is shared between engines and chips and thin evidence stays near the
typical value. TTFT's own constants are fitted after it, the others fixed. What is left is corrected smoothly
(`fit_residual.py`).

Validation leaves out measurements with their copies, and what a user may have that no run had: a whole group (model,
system, engine and precision together), a whole model, a whole system; models of one shape are one model. What is
left out is in no fit that predicts it: not of constants, not of corrections, and not of the reaches of these, which are
learned without any of half of the folds. What a range is worth depends on what is new, so each has the residuals of
its own leaving-out.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from fit_residual import NOISE, Learned, fitted, learn
from headway.plan.runs import PublicRun, read_runs
from headway.roofline.calibrate import FILE, FITTED, LOADS, SEEN, Calibration, Region, spread_class
from headway.roofline.constants import CONSTANTS, FIRST_TOKEN, Constant, family, labels, typical
from headway.roofline.loop import Columns, Fleet, Loop
from headway.roofline.residual import Correction, Points, save
from headway.roofline.robust import descend
from headway.roofline.served import METRICS, served
from planner_report import report

# Scale of the residuals the likelihood expects; smaller trusts the runs more and the priors less.
SIGMA = {"tpot": 0.07, "ttft": 0.35}
TAILS = 4.0  # degrees of freedom of the Student-t: runs far off lose their vote
LEVEL_SCALE = {"engine_family": 0.5, "precision_family": 0.7}  # prior spread of a level over that of the others: 1
LEVEL_SPREAD = 0.12  # prior spread of a level's offset, for a constant whose common offset has 0.3
RECIPE_SPREAD = 0.4
STEPS, ENOUGH = 120, 1e-3  # most steps of a fit; a step that gains less than this share of the cost is the last
STEP = 1e-4  # of the finite differences
WITHIN = 0.78  # share of runs that a range is to hold
LEARNINGS = 2  # parts of the folds, without each of which reaches are learned once
TAILS_OUT = (
    0.12,
    0.11,
    0.1,
    0.09,
    0.08,
    0.065,
    0.05,
    0.04,
    0.03,
    0.02,
    0.01,
    0.0,
)  # shares of the residuals left out at either end
LEAST = 0.1  # deviations that a range has at either end
FEW = 40  # runs: a class with fewer takes the range of its kind
DOCUMENT = Path(__file__).parents[1] / "docs" / "accuracy-planner.md"


class Problem:
    """The offsets of some constants as one vector, for fixed runs."""

    def __init__(self, runs: Sequence[PublicRun], constants: Sequence[Constant]) -> None:
        deployments = [run.deployment for run in runs]
        self.constants = constants
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

    def values(self, theta: np.ndarray, nudge: Mapping[str, float] | None = None) -> Columns:
        """Every constant of every run, the sums of offsets of some of them nudged."""
        found = {}
        for constant in self.constants:
            mine = [i for i, (name, _) in enumerate(self.keys) if name == constant.name]
            total = theta[mine] @ self.masks[mine] + (nudge or {}).get(constant.name, 0.0)
            found[constant.name] = constant.value(self.typical[constant.name], total)
        return found

    def slopes(self, theta: np.ndarray, predict: Callable[[Columns], np.ndarray]) -> np.ndarray:
        """d log(prediction) / d offset, one row per offset: all levels of a constant share its derivative."""
        here = predict(self.values(theta))
        change = {
            constant.name: (predict(self.values(theta, {constant.name: STEP})) - here) / STEP
            for constant in self.constants
        }
        return np.array([change[name] * mask for (name, _), mask in zip(self.keys, self.masks, strict=True)])

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


def likeliest(
    problem: Problem,
    predict: Callable[[Columns], np.ndarray],
    measured: np.ndarray,
    votes: np.ndarray,
    start: np.ndarray,
    sigma: float,
    slopes: np.ndarray | None = None,
) -> np.ndarray:
    """The offsets that make the runs most likely. Slopes cost as much as twenty predictions, so they are kept until
    they lead nowhere.

    Args:
        predict: logarithms of seconds under some constants.
        votes: weight of each run in the likelihood, 0 = left out.
        sigma: scale of the residuals.
        slopes: at `start`, if they are known.
    """
    kept = slopes

    def errors(theta: np.ndarray) -> np.ndarray:
        return (np.exp(predict(problem.values(theta))) / measured - 1) / sigma

    def slope(theta: np.ndarray, error: np.ndarray, exact: bool) -> np.ndarray:
        nonlocal kept
        if kept is None or exact:
            kept = problem.slopes(theta, predict)
        return kept * (error + 1 / sigma)

    return descend(
        errors, start, problem.spread, votes=votes * (TAILS + 1) / TAILS, tails=TAILS, slopes=slope, rounds=STEPS,
        enough=ENOUGH,
    )  # fmt: skip


class Fitter:
    """Both fits on any subset of the runs."""

    def __init__(self, runs: Sequence[PublicRun]) -> None:
        self.runs, self.kind = runs, runs[0].deployment.kind
        self.points = Points.of([run.deployment for run in runs])
        self.fleet = Fleet.of([run.deployment for run in runs])
        self.token, self.first = Problem(runs, CONSTANTS), Problem(runs, FIRST_TOKEN)
        self.measured = {metric: np.array([getattr(run, metric) for run in runs]) for metric in METRICS}
        self.votes = np.zeros(len(runs))
        self.votes[distinct(runs)] = 1.0
        self.best = np.zeros(len(self.token.keys)), np.zeros(len(self.first.keys))
        self.slopes: list[np.ndarray | None] = [None, None]
        self.best = self.fit(self.votes)
        self.slopes = [
            self.token.slopes(self.best[0], self._token),
            self.first.slopes(self.best[1], self._first(self.best[0])),
        ]

    def _token(self, values: Columns) -> np.ndarray:
        return np.asarray(np.log(Loop.calibrated(self.fleet, values).tokens()["tpot"]))

    def _first(self, token: np.ndarray) -> Callable[[Columns], np.ndarray]:
        loop = Loop.calibrated(self.fleet, self.token.values(token))
        solved = loop.tokens()
        return lambda values: np.log(loop.first_token(solved, values))

    def fit(self, votes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The offsets fitted on the runs that have a vote, from the best known ones."""
        theta: list[np.ndarray] = []
        for metric, problem in (("tpot", self.token), ("ttft", self.first)):
            predict = self._first(theta[0]) if theta else self._token
            at = len(theta)
            start, slopes = self.best[at], self.slopes[at]
            theta.append(likeliest(problem, predict, self.measured[metric], votes, start, SIGMA[metric], slopes))
        return theta[0], theta[1]

    def offsets(self, theta: tuple[np.ndarray, np.ndarray]) -> dict[str, dict[str, float]]:
        return self.token.offsets(theta[0]) | self.first.offsets(theta[1])

    def logs(self, theta: tuple[np.ndarray, np.ndarray]) -> Columns:
        """What the physics leaves: logarithms of measured over predicted."""
        loop = Loop.calibrated(self.fleet, self.token.values(theta[0]) | self.first.values(theta[1]))
        solved = loop.solve()
        return {metric: np.log(self.measured[metric] / solved[metric]) for metric in METRICS}

    def learn(self, votes: np.ndarray, theta: tuple[np.ndarray, np.ndarray]) -> dict[str, Learned]:
        """How far corrections reach, from the runs that have a vote."""
        logs, groups = self.logs(theta), [SEEN["group"](run.deployment) for run in self.runs]
        return {metric: learn(self.points, logs[metric], votes, groups, NOISE[metric]) for metric in METRICS}

    def correction(
        self, votes: np.ndarray, theta: tuple[np.ndarray, np.ndarray], learned: dict[str, Learned]
    ) -> Correction:
        return fitted(self.points, self.logs(theta), votes, learned)

    def left_out(self, folds: Sequence[Hashable]) -> Columns:
        """What every run is predicted to take by fits without its fold: seconds and deviation of each metric, and the
        `physics_` seconds."""
        found: Columns = {}
        for part in range(LEARNINGS):
            mine = sorted({fold for fold in folds if _parted(fold, LEARNINGS) == part}, key=str)
            if not mine:
                continue
            votes = np.where([fold in mine for fold in folds], 0.0, self.votes)
            learned = self.learn(votes, self.fit(votes))
            for fold in mine:
                out = np.array([one == fold for one in folds])
                votes = np.where(out, 0.0, self.votes)
                theta = self.fit(votes)
                correction, logs = self.correction(votes, theta, learned), self.logs(theta)
                deployments = [run.deployment for run, taken in zip(self.runs, out, strict=True) if taken]
                columns = served({self.kind: self.offsets(theta)}, deployments, {self.kind: correction})
                columns |= {f"physics_{metric}": self.measured[metric][out] / np.exp(logs[metric][out])
                            for metric in METRICS}  # fmt: skip
                for name, column in columns.items():
                    found.setdefault(name, np.zeros(len(self.runs)))[out] = column
        return found


def _parted(thing: Hashable, parts: int) -> int:
    """Random parts, the same every time."""
    return int(hashlib.sha256(repr(thing).encode()).hexdigest(), 16) % parts


def distinct(runs: Sequence[PublicRun]) -> np.ndarray:
    """The first of every measurement: the exports overlap, and a copy is no further evidence."""
    seen: dict[Hashable, int] = {}
    for index, run in enumerate(runs):
        seen.setdefault(measurement(run), index)
    return np.array(sorted(seen.values()))


def series(run: PublicRun) -> tuple[Hashable, ...]:
    """What was run, without the name of the checkpoint and at any load."""
    d = run.deployment
    return (
        d.shape.params, run.system, d.engine, d.precision, d.gpus, d.attention_dp, d.expert_parallel, d.prompt,
        d.output, d.disaggregated, d.drafts,
    )  # fmt: skip


def measurement(run: PublicRun) -> Hashable:
    """What copies of a run have in common."""
    return series(run), run.deployment.concurrency, run.tpot, run.ttft


def _seen(level: str, run: PublicRun) -> Hashable:
    """Groups and cells are many: a fifth of them is left out at a time."""
    name = SEEN[level](run.deployment)
    return _parted(name, 5) if level in ("group", "cell") else name


# What is left out together, by what is then new about it (`calibrate.SEEN`).
FOLDS: dict[str, Callable[[PublicRun], Hashable]] = {
    FITTED: lambda run: _parted(measurement(run), 4),
    **{new: partial(_seen, new) for new in SEEN},
}


class LeftOut(msgspec.Struct, frozen=True):
    """Runs of one kind predicted without those of their fold.

    Attributes:
        new: what is new about each then. folds: of each run.
        predicted: seconds by metric, and their `deviation_`, and those of the `physics_` alone.
        measured: seconds by metric. classes: keys of their ranges.
    """

    new: str
    folds: list[Hashable]
    predicted: Columns
    measured: Columns
    classes: list[str]

    @classmethod
    def of(cls, fitter: Fitter, new: str) -> LeftOut:
        folds = [FOLDS[new](run) for run in fitter.runs]
        classes = [spread_class(run.deployment, new) for run in fitter.runs]
        return cls(new, folds, fitter.left_out(folds), fitter.measured, classes)

    def residual(self, metric: str) -> np.ndarray:
        """log(measured / predicted), over the deviation that was expected of it."""
        return np.log(self.measured[metric] / self.predicted[metric]) / self.predicted[f"deviation_{metric}"]

    def range(self, metric: str, name: str, tail: float, rows: np.ndarray | None = None) -> tuple[float, float]:
        """All but `tail` at either end of one class's residuals, among `rows`; of all classes' where it has too few."""
        allowed = np.ones(len(self.classes), bool) if rows is None else rows
        mine = allowed & np.array([one == name for one in self.classes])
        low, high = np.quantile(self.residual(metric)[mine if mine.sum() >= FEW else allowed], (tail, 1 - tail))
        return float(low), float(high)

    def held(self, metric: str, tail: float) -> np.ndarray:
        """Was each run in the range that the other folds' residuals give?"""
        residual, folds = self.residual(metric), np.array([hash(fold) for fold in self.folds])
        inside = np.zeros(len(residual), bool)
        for fold in set(folds):
            ranges = {name: self.range(metric, name, tail, folds != fold) for name in set(self.classes)}
            for row in np.flatnonzero(folds == fold):
                low, high = ranges[self.classes[row]]
                inside[row] = low <= residual[row] <= high
        return inside

    def tail(self, metric: str) -> float:
        """The share to leave out at either end so that ranges hold `WITHIN` of a fold that was not looked at. Runs of
        one fold err alike: 10 % of so few folds' runs are too many, for another fold lies beyond."""
        return next((tail for tail in TAILS_OUT if self.held(metric, tail).mean() >= WITHIN), TAILS_OUT[-1])


def spreads(validated: Mapping[str, Sequence[LeftOut]]) -> dict[str, dict[str, tuple[float, float]]]:
    """The range of every class."""
    table: dict[str, dict[str, tuple[float, float]]] = {metric: {} for metric in METRICS}
    for metric in METRICS:
        for kind, several in validated.items():
            for one in several:
                tail = one.tail(metric)
                for load in LOADS:
                    name = f"{kind}{load}: {one.new}"
                    low, high = one.range(metric, name, tail)
                    table[metric][name] = (round(min(low, -LEAST), 4), round(max(high, LEAST), 4))
    return table


def region(runs: Sequence[PublicRun]) -> Region:
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
        seen={level: tuple(sorted({of(d) for d in deployments})) for level, of in SEEN.items()},
    )


def calibrated(table: Path, fitters: Mapping[str, Fitter], validated: Mapping[str, Sequence[LeftOut]]) -> Calibration:
    """Everything `calibration.json` holds."""
    runs = [run for fitter in fitters.values() for run in fitter.runs]
    return Calibration(
        source={
            "runs": f"{len(runs)} measured serving runs",
            "origin": "ai-dynamo/aiconfigurator, silicon runs, Apache-2.0",
            "sha256": hashlib.sha256(table.read_bytes()).hexdigest(),
            "written_by": "benchmarks/fit_planner.py",
        },
        offsets={kind: fitter.offsets(fitter.best) for kind, fitter in fitters.items()},
        spread=spreads(validated),
        region=region(runs),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("--check", action="store_true", help="print the errors, write nothing")
    options = parser.parse_args()
    runs = [run for run in read_runs(options.table)[0] if run.deployment.fits and not run.doubt]
    fitters = {kind: Fitter([run for run in runs if run.deployment.kind == kind]) for kind in ("dense", "moe")}
    validated = {kind: [LeftOut.of(fitter, new) for new in FOLDS] for kind, fitter in fitters.items()}
    corrections = {
        kind: fitter.correction(fitter.votes, fitter.best, fitter.learn(fitter.votes, fitter.best))
        for kind, fitter in fitters.items()
    }
    found = calibrated(options.table, fitters, validated)
    runs_of = {kind: fitter.runs for kind, fitter in fitters.items()}
    text = report(options.table, found, corrections, runs_of, validated)
    print(text)
    if not options.check:
        FILE.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
        save(corrections)
        DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
