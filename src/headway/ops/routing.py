"""Which experts compute a token, and what its gate does: parameters of `Ops.experts`, and the router in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_TINY = np.float32(1e-20)  # keeps a sum of scores that are all 0 from dividing


@dataclass(frozen=True)
class Routing:
    """How a router's numbers, one per expert, become the weights of the few experts that compute a token.

    Attributes:
        active: experts per token.
        sigmoid: an expert's score is the sigmoid of its number, instead of the softmax over all.
        renormalise: the weights of the chosen are divided by their sum.
        scale: what weights are multiplied by in the end.
        groups: neighbouring experts form so many groups, of which only `kept_groups` are chosen from.
        kept_groups: those whose `merit` best experts have the largest sum of scores.
        merit: see there.
    """

    active: int
    sigmoid: bool = False
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    merit: int = 1


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gpt-oss' gate: g * sigmoid(alpha * g) * (u + 1), with g at most `limit` and u within [-limit, limit]."""

    alpha: float
    limit: float


def choose(
    numbers: np.ndarray, routing: Routing, correction: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Route float32 [T, experts] -> (experts [T, active], best first, their weights, float32 [T, active]).

    correction: [experts], added to the scores where they are compared, not where they weigh (DeepSeek V3). Of equal
    scores the first counts as the better.
    """
    if routing.sigmoid:
        with np.errstate(over="ignore"):
            scores = 1 / (1 + np.exp(-numbers))
    else:
        scores = np.exp(numbers - numbers.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    merit = scores if correction is None else scores + correction
    if routing.kept_groups < routing.groups:
        by_group = merit.reshape(len(merit), routing.groups, -1)
        best = np.sort(by_group, axis=2)[:, :, -routing.merit :].sum(axis=2)
        dropped = np.argsort(-best, axis=1, kind="stable")[:, routing.kept_groups :]
        by_group = by_group.copy()
        np.put_along_axis(by_group, dropped[:, :, None], -np.inf, axis=1)
        merit = by_group.reshape(merit.shape)
    chosen = np.argsort(-merit, axis=1, kind="stable")[:, : routing.active]
    weights = np.take_along_axis(scores, chosen, axis=1)
    if routing.renormalise:
        weights /= weights.sum(axis=1, keepdims=True) + _TINY
    return chosen, weights * np.float32(routing.scale)
