"""Robust penalised least squares: the constants that make measurements most likely, given what is usual of them.

    cost = tails / 2 * sum votes log(1 + error^2 / tails) + sum ((theta - typical) / wide)^2 / 2

Errors, in units of the usual one, have the heavy tails of Student's t with `tails` degrees of freedom (another process
ran, a row is mislabelled), so no outlier captures the fit; each constant is drawn to its typical value, so one that
nothing is measured of stays there. Gauss-Newton steps with Levenberg's damping.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

NUDGE = 1e-4  # of the finite differences
FARTHEST = 0.5  # that a constant moves in one step

Errors = Callable[[np.ndarray], np.ndarray]
Slopes = Callable[[np.ndarray, np.ndarray, bool], np.ndarray]


def descend(
    errors: Errors,
    start: np.ndarray,
    wide: np.ndarray,
    *,
    typical: np.ndarray | float = 0.0,
    votes: np.ndarray | float = 1.0,
    tails: float = 1.0,
    slopes: Slopes | None = None,
    rounds: int = 60,
    enough: float = 1e-6,
) -> np.ndarray:
    """Constants of the nearest least cost.

    Args:
        errors: of some constants, in units of the usual error.
        wide: how far from `typical` each constant may well be.
        votes: weight of each error, 0 = left out.
        slopes: d error / d constant, one row per constant, of (constants, errors, exact); unless `exact` they may be
            those of earlier constants. None = finite differences.
        enough: a step that gains a smaller share of the cost, with exact slopes, is the last.
    """

    def cost(error: np.ndarray, theta: np.ndarray) -> float:
        robust = (votes * np.log1p(error**2 / tails)).sum() * tails / 2
        return float(robust + (((theta - typical) / wide) ** 2).sum() / 2)

    def nudged(theta: np.ndarray, error: np.ndarray, _: bool) -> np.ndarray:
        return np.stack([(errors(theta + step) - error) / NUDGE for step in NUDGE * np.eye(len(theta))])

    theta, damping, exact = start.copy(), 1e-3, True
    error = errors(theta)
    best = cost(error, theta)
    for number in range(rounds):
        slope = (slopes or nudged)(theta, error, exact and number > 0)
        weight = votes / (1.0 + error**2 / tails)
        curvature = (slope * weight) @ slope.T + np.diag(wide**-2.0)
        gradient = slope @ (weight * error) + (theta - typical) / wide**2
        before = best
        for _ in range(6 if exact else 2):
            move = -np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient)
            trial = theta + np.clip(move, -FARTHEST, FARTHEST)
            tried = errors(trial)
            found = cost(tried, trial)
            if found < best:
                theta, error, best, damping = trial, tried, found, max(damping / 5, 1e-6)
                break
            damping *= 8
        if before - best > enough * abs(best):
            exact = slopes is None
        elif exact:
            break
        else:
            exact, damping = True, 1e-3
    return theta
