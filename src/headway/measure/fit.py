"""Fit `StepTime`'s constants to measured steps, and say how far off it is on steps it was not fitted on.

    log(measured) = log(Efficiency.seconds(work, pi, beta)) + noise,   pi and beta probed in the same moment

The constants are those of `Efficiency` that a CPU backend has. Each is positive, so its logarithm is fitted, drawn
towards a typical value (`roofline/robust.py`): first with much noise and then with the usual one. Steps may come from
models made for the purpose (`headway.measure.synthetic`) or from a recorded run: the form is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from headway.core.errors import BadInput
from headway.roofline.profile import Fit
from headway.roofline.robust import descend
from headway.roofline.step import Efficiency
from headway.roofline.work import StepWork

# Constant -> (typical value, how far from it a constant may well be, as a logarithm). A share of memory's bandwidth is
# known well beforehand; what the arithmetic of a backend reaches is not.
TYPICAL = {
    "stream": (0.95, 0.1), "ceiling": (8e10, 1.0), "linear": (0.6, 1.0), "stream_cache": (0.7, 0.5),
    "attention": (0.1, 1.5), "prefill_attention": (0.1, 1.5), "overlap": (0.8, 0.5), "step": (1e-4, 2.0),
    "layer": (1e-5, 2.0), "row": (1e-5, 2.0), "element": (3e-9, 2.0), "logit": (1e-9, 2.0),
}  # fmt: skip
NOISE = (0.3, 0.03)  # error of a step, as a logarithm: while searching, and usually
BOUNDED = ("overlap",)  # shares that cannot pass 1 (another share may: a probe is no exact peak)
FOLDS = 4
SPREAD = 1.35  # bandwidths that differ by more are of two regimes of the machine
COVER = 12  # sizes of step that a regime must have shown to be fitted by itself
LEAST = len(TYPICAL)  # steps that a fit needs
ROUNDS = 60
QUANTILES = (0.1, 0.9)  # of the range that is told, the planner's too
EDGES = (0.05, 0.95)
MOST = 5.0  # times as long as predicted: a step that took longer says nothing of the next ones


class Observation(msgspec.Struct, frozen=True):
    """A measured step.

    Attributes:
        work: what it had to do.
        bandwidth, peak: bytes/s that memory gave, and FLOP/s that the cores gave, in the same moment.
        seconds: it took.
        point: what it repeats; the repetitions of a point are left out together.
    """

    work: StepWork
    bandwidth: float
    peak: float
    seconds: float
    point: str


def fit(observations: Sequence[Observation], math: str) -> Fit:
    """The constants that explain these steps best.

    Args:
        math: number format the steps multiplied in.

    Raises:
        BadInput: too few steps, or of too few sizes, to fit on.
    """
    points = sorted({one.point for one in observations})
    if len(observations) < LEAST or len(points) < FOLDS:
        raise BadInput("steps", f"{len(observations)} steps of {len(points)} sizes; a fit needs {LEAST} of {FOLDS}")
    residuals = []
    for fold in range(FOLDS):
        out = set(points[fold::FOLDS])
        found = _solve([one for one in observations if one.point not in out])
        residuals.append(residual_of([one for one in observations if one.point in out], found))
    logs = np.concatenate(residuals)
    low, high = np.quantile(logs, QUANTILES)
    rates = [float(one.bandwidth) for one in observations]
    return Fit(
        efficiency=_solve(observations),
        math=math,
        peak=float(np.median([one.peak for one in observations])),
        low=float(np.exp(min(low, 0.0))),
        high=float(np.exp(max(high, 0.0))),
        error=float(np.median(np.abs(np.expm1(-logs)))),
        bandwidth=(min(rates), float(np.median(rates)), max(rates)),
        steps=len(observations),
        mean=float(np.mean(np.minimum(np.exp(logs), MOST))),
    )


def fit_regimes(observations: Sequence[Observation], math: str) -> list[Fit]:
    """A fit for each regime that the machine was in, the one with most steps first.

    A virtual machine's cores may move to places with more memory bandwidth but slower ways between cores, so that all
    constants change at once; bandwidth tells the regimes apart. One that showed too few steps is left out.

    Raises:
        BadInput: as `fit`.
    """
    rates = [one.bandwidth for one in observations]
    least, most = np.quantile(rates, EDGES) if rates else (1.0, 1.0)
    if most > SPREAD * least:
        middle = (least * most) ** 0.5
        slow = [one for one in observations if one.bandwidth < middle]
        fast = [one for one in observations if one.bandwidth >= middle]
        parts = sorted((slow, fast), key=len, reverse=True)
        enough = [part for part in parts if len({one.point for one in part}) >= COVER and len(part) >= LEAST]
        if enough:
            return [fit(part, math) for part in enough]
    return [fit(observations, math)]


def residual_of(observations: Sequence[Observation], efficiency: Efficiency) -> np.ndarray:
    """log(measured / predicted) of each step."""
    return _residual(_stacked(observations), efficiency)


def _residual(steps: Observation, efficiency: Efficiency) -> np.ndarray:
    return np.asarray(np.log(steps.seconds / efficiency.seconds(steps.work, steps.peak, steps.bandwidth)))


def _stacked(observations: Sequence[Observation]) -> Observation:
    """All steps as one whose figures are arrays: the model's formula works on both."""
    works = [one.work for one in observations]
    columns: dict[str, Any] = {
        name: np.transpose([getattr(work, name) for work in works]).astype(float) for name in StepWork.__struct_fields__
    }
    work = StepWork(**columns | {name: tuple(columns[name]) for name in ("bytes", "flops")})
    rates: Any = np.transpose([(one.bandwidth, one.peak, one.seconds) for one in observations])
    return Observation(work, rates[0], rates[1], rates[2], point="")


def _solve(observations: Sequence[Observation]) -> Efficiency:
    steps, typical = _stacked(observations), np.log([usual for usual, _ in TYPICAL.values()])
    at, wide = typical, np.array([away for _, away in TYPICAL.values()])

    def errors(noise: float, logs: np.ndarray) -> np.ndarray:
        return _residual(steps, _efficiency(logs)) / noise

    for noise in NOISE:
        at = descend(partial(errors, noise), at, wide, typical=typical, rounds=ROUNDS)
    return _efficiency(at)


def _efficiency(logs: np.ndarray) -> Efficiency:
    values = {name: float(np.exp(log)) for name, log in zip(TYPICAL, logs, strict=True)}
    experts = {"stream_experts": values["stream"], "experts": values["linear"]}  # the same kernels on the same tiles
    return Efficiency(**values | experts | {name: min(values[name], 1.0) for name in BOUNDED})
