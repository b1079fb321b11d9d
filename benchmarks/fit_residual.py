"""Fits the smooth correction of the planner's estimates (`headway/roofline/residual.py`) to what its physics leaves.

Reaches, spread and noise are those that make the runs likely, each given the others of its group, and each group given
the other groups: the second keeps from the correction what does not generalise. Both on a random sample of the runs,
whose order of the cost is its number cubed. Runs that contradict all others lose their vote.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch

from headway.roofline.residual import LABELS, NUMBERS, Correction, Points, Process, alike, reaches, spread_out, squares

SAMPLE, STEPS, RATE = 280, 32, 0.16  # runs to learn from; steps of Adam and their size
USUAL_REACH, FREE = 0.3, 1.0  # prior of a reach: its typical value and the spread of its logarithm
TAILS = 4.0  # degrees of freedom of Student's t, for runs far off
NOISE = {"tpot": 0.04, "ttft": 0.1}  # least, of the logarithm: what runs of one description differ by
LEAST = 0.05  # of a vote

Learned = tuple[dict[str, float], float, float]  # reach of each number and name; spread; noise


def learn(points: Points, logs: np.ndarray, votes: np.ndarray, groups: Sequence[Hashable], noise: float) -> Learned:
    """The reaches, spread and noise, of at least `noise`, under which a sample of the rows with a vote is likeliest."""
    drawn = np.random.default_rng(0).permutation(np.flatnonzero(votes))[:SAMPLE]
    places = torch.tensor(spread_out(points, points.numbers, points.names)[drawn])
    wide = torch.tensor(reaches(points, {name: i for i, name in enumerate((*NUMBERS, *LABELS))}).astype(int))
    target, shares = torch.tensor(logs[drawn]), torch.tensor(1 / votes[drawn])
    members: dict[Hashable, list[int]] = {}
    for at, row in enumerate(drawn):
        members.setdefault(groups[row], []).append(at)
    usual = torch.full((len(NUMBERS) + len(LABELS),), float(np.log(USUAL_REACH)), dtype=torch.float64)
    reach, scales = usual.clone(), torch.tensor([np.log(logs[drawn].std()), np.log(noise)])
    for one in (reach, scales):
        one.requires_grad_(True)
    adam = torch.optim.Adam([reach, scales], lr=RATE)
    for _ in range(STEPS):
        adam.zero_grad()
        scaled = places * torch.exp(reach)[wide]
        lengths = (scaled * scaled).sum(1)
        far = (lengths[:, None] + lengths[None] - 2 * scaled @ scaled.T).clamp_min(1e-12)
        gram = torch.exp(2 * scales[0]) * alike(far, torch.exp) + torch.diag(
            (noise**2 + torch.exp(2 * scales[1])) * shares
        )
        cost = unlikely(gram, target, list(members.values())) + ((reach - usual) ** 2).sum() / (2 * FREE**2)
        cost.backward()
        adam.step()
    found = torch.exp(reach.detach()).tolist()
    spread, further = torch.exp(scales.detach()).tolist()
    return dict(zip((*NUMBERS, *LABELS), found, strict=True)), spread, float(np.hypot(noise, further))


def unlikely(gram: torch.Tensor, target: torch.Tensor, members: Sequence[Sequence[int]]) -> torch.Tensor:
    """- log likelihood of all rows, and of each group's given those of all others (with the tails of Student's t)."""
    lower = torch.linalg.cholesky(gram)
    weights = torch.cholesky_solve(target[:, None], lower)[:, 0]
    cost = 0.5 * target @ weights + torch.log(torch.diagonal(lower)).sum()
    inverse = torch.cholesky_inverse(lower)
    for rows in members:
        own = torch.linalg.cholesky(inverse[rows][:, rows])
        error = torch.cholesky_solve(weights[rows][:, None], own)[:, 0]
        variance = torch.diagonal(torch.cholesky_inverse(own))
        cost = cost + 0.5 * (torch.log(variance) + (TAILS + 1) * torch.log1p(error**2 / variance / TAILS)).sum()
    return cost


def condition(points: Points, logs: np.ndarray, votes: np.ndarray, learned: Learned) -> Process:
    """The weights of the rows, all of which have a vote; those that contradict all others are left less of it."""
    reach, spread, noise = learned
    places = spread_out(points, points.numbers, points.names) * reaches(points, reach)
    gram = spread**2 * alike(squares(places, places))
    inverse = np.linalg.inv(gram + np.diag(noise**2 / votes))
    # squared error of each row given all others, over its variance
    contradicted = (inverse @ logs) ** 2 / np.diagonal(inverse)
    shares = votes * np.maximum((TAILS + 1) / (TAILS + contradicted.clip(1.0)), LEAST)
    weights = np.linalg.solve(gram + np.diag(noise**2 / shares), logs)
    return Process(
        {name: float(f"{value:.3g}") for name, value in reach.items()}, round(spread, 4), round(noise, 4),
        [float(f"{value:.6g}") for value in weights], [round(float(value), 3) for value in shares],
    )  # fmt: skip


def merged(points: Points) -> tuple[Points, np.ndarray]:
    """The same without copies of a description, and which of them each row is."""
    keys = [(*numbers, *names) for numbers, names in zip(points.numbers, points.names, strict=True)]
    first: dict[Hashable, int] = {}
    which = np.array([first.setdefault(key, len(first)) for key in keys])
    _, rows = np.unique(which, return_index=True)
    return Points(points.known, [points.numbers[i] for i in rows], [points.names[i] for i in rows]), which


def fitted(points: Points, logs: dict[str, np.ndarray], votes: np.ndarray, learned: dict[str, Learned]) -> Correction:
    """The correction that the rows with a vote make. logs: measured over predicted, by metric."""
    merges, which = merged(points)
    count = np.bincount(which, votes)
    kept = np.flatnonzero(count)
    rows = Points(points.known, [_short(merges.numbers[i]) for i in kept], [merges.names[i] for i in kept])
    means = {metric: (np.bincount(which, votes * mine)[kept] / count[kept]) for metric, mine in logs.items()}
    return Correction(rows, {name: condition(rows, mine, count[kept], learned[name]) for name, mine in means.items()})


def _short(numbers: Sequence[float]) -> list[float]:
    return [round(number, 4) for number in numbers]
