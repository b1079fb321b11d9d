"""What measured runs say beyond the physics: a smooth correction of its estimates, which knows what it has not seen.

The logarithm of measured over predicted is taken as a Gaussian process over what a deployment is: logarithms of load,
lengths, GPUs and parallelism, drafts, and names (model, engine, device, precision...), with a distance of its own for
each. Deployments like measured ones are corrected as those were; the deviation grows with the distance from them, so
that a range is as wide as the ignorance. A time per token is corrected where each name of its group (model,
device, engine, precision) was measured, where they were not measured together by a fifth at most (`served.CROSSED`); a
time to first token only where that very group was: of others, runs say nothing that holds, or worse
(docs/accuracy-planner.md).

    k(x, y) = spread^2 (1 + r) exp(-r),  r = sqrt(3 sum (reach_j (x_j - y_j))^2)     Matern 3/2; names differ by 0 or 1
    correction = sum_i weight_i k(x, x_i)                     over the measured runs, weights solved by the fit

The runs and their weights lie in `residual.json.gz` beside this file, written by `benchmarks/fit_planner.py`.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from math import inf, log2
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway.roofline.constants import family
from headway.roofline.deployment import Deployment

FILE = Path(__file__).with_name("residual.json.gz")
NEAREST = 48  # measured runs that say how sure a correction is; further ones change nothing
CHUNK = 1024  # deployments whose neighbours are looked for at once


def _pool(d: Deployment) -> tuple[float, float]:
    """GPUs of a prefill worker, and of the pool per decode worker; 1 where it is not said or there is none."""
    if d.prefill is None or d.prefill.workers == inf:
        return 1.0, 1.0
    return d.prefill.gpus, d.prefill.gpus * d.prefill.workers / d.workers


NUMBERS: dict[str, Callable[[Deployment], float]] = {
    "concurrency": lambda d: log2(d.concurrency),
    "prompt": lambda d: log2(d.prompt),
    "output": lambda d: log2(d.output),
    "gpus": lambda d: log2(d.gpus),
    "attention_dp": lambda d: log2(d.attention_dp),
    "expert_parallel": lambda d: log2(d.expert_parallel),
    "workers": lambda d: log2(d.workers),
    "prefill_gpus": lambda d: log2(_pool(d)[0]),
    "prefill_pool": lambda d: log2(_pool(d)[1]),
    "drafts": lambda d: float(d.drafts or 0),
}
LABELS: dict[str, Callable[[Deployment], str]] = {
    "model": lambda d: f"{d.shape.n_params / 1e9:.4g}B",  # models of one shape are one model
    "engine": lambda d: d.engine,
    "device": lambda d: d.hardware.name,
    "family": lambda d: family(d.hardware.name),
    "precision": lambda d: d.precision,
    "version": lambda d: f"{d.engine} {d.version}",
    "pools": lambda d: "one" if d.prefill is None else "unsaid" if d.prefill.workers == inf else "two",
    "drafting": lambda d: "unrecorded" if d.drafts is None else "some" if d.drafts else "none",
}
LOAD = list(NUMBERS).index("concurrency")
GROUP = [list(LABELS).index(name) for name in ("model", "device", "engine", "precision")]


def alike(squares: Any, exp: Callable[[Any], Any] = np.exp) -> Any:
    """Correlation at squared distances; `exp` of the library whose arrays they are."""
    r = (3 * squares) ** 0.5
    return (1 + r) * exp(-r)


class Process(msgspec.Struct, frozen=True):
    """A metric's process: `reach` of each number and name (one over the distance that matters), `spread` of corrections
    and `noise` of a run, as logarithms; of each measured run its `weights` and `votes` (how many runs it stands for,
    less where it contradicts all others)."""

    reach: dict[str, float]
    spread: float
    noise: float
    weights: list[float]
    votes: list[float]


class Points(msgspec.Struct, frozen=True):
    """Measured runs as rows of `numbers` and of indices into `known`, the names met of each kind."""

    known: dict[str, list[str]]
    numbers: list[list[float]]
    names: list[list[int]]

    @classmethod
    def of(cls, deployments: Sequence[Deployment]) -> Points:
        """Deployments as they stand, each with names of its own."""
        known = {kind: sorted({name(d) for d in deployments}) for kind, name in LABELS.items()}
        return cls(known, *described(deployments, known))


def described(
    deployments: Sequence[Deployment], known: dict[str, list[str]]
) -> tuple[list[list[float]], list[list[int]]]:
    """Numbers and names of deployments; a name that is not known is the one after the last."""
    index = {kind: {name: i for i, name in enumerate(names)} for kind, names in known.items()}
    return (
        [[number(d) for number in NUMBERS.values()] for d in deployments],
        [[index[kind].get(name(d), len(known[kind])) for kind, name in LABELS.items()] for d in deployments],
    )


def spread_out(points: Points, numbers: Sequence[Sequence[float]], names: Sequence[Sequence[int]]) -> np.ndarray:
    """Coordinates whose squared distances are those of numbers, and 0 or 1 for names; (rows, coordinates)."""
    marks = np.asarray(names, int).reshape(-1, len(LABELS))
    columns = [np.asarray(numbers, float).reshape(-1, len(NUMBERS))]
    for at, known in enumerate(points.known.values()):
        columns.append(np.eye(len(known) + 1)[marks[:, at]] / np.sqrt(2.0))
    return np.hstack(columns)


def reaches(points: Points, reach: dict[str, float]) -> np.ndarray:
    """One factor per coordinate of `spread_out`."""
    wide = [1] * len(NUMBERS) + [len(known) + 1 for known in points.known.values()]
    return np.repeat([reach[name] for name in (*NUMBERS, *LABELS)], wide)


def squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Squared distances of all rows of one from all of the other."""
    found: np.ndarray = (a * a).sum(1)[:, None] + (b * b).sum(1)[None] - 2 * a @ b.T
    return np.maximum(found, 0.0)


class Correction:
    """The process of one kind of model, for any deployments of it."""

    def __init__(self, points: Points, fits: dict[str, Process]) -> None:
        self.points, self.fits = points, fits

    @cached_property
    def _places(self) -> np.ndarray:
        return spread_out(self.points, self.points.numbers, self.points.names)

    def places(self, deployments: Sequence[Deployment]) -> np.ndarray:
        """Coordinates of deployments; the column `LOAD` is the logarithm (base 2) of their load."""
        return spread_out(self.points, *described(deployments, self.points.known))

    def measured(self, metric: str, deployments: Sequence[Deployment]) -> np.ndarray:
        """Whether there are runs to correct each one by."""
        groups = {tuple(names[i] for i in GROUP) for names in self.points.names}
        known = [{group[i] for group in groups} for i in range(len(GROUP))]
        _, named = described(deployments, self.points.known)
        mine = [tuple(names[i] for i in GROUP) for names in named]
        if metric == "ttft":
            return np.array([group in groups for group in mine], bool)
        return np.array([all(name in seen for name, seen in zip(group, known, strict=True)) for group in mine], bool)

    def log(self, metric: str, places: np.ndarray) -> np.ndarray:
        """The correction: logarithm of what is to be expected over what the physics predicts."""
        fit, found = self.fits[metric], np.zeros(len(places))
        reach, weights = reaches(self.points, fit.reach), np.array(fit.weights)
        measured = self._places * reach
        for at in range(0, len(places), CHUNK):
            near = alike(squares(places[at : at + CHUNK] * reach, measured))
            found[at : at + CHUNK] = fit.spread**2 * (near @ weights)
        return found

    def deviation(self, metric: str, places: np.ndarray) -> np.ndarray:
        """Standard deviation of a run's logarithm around that: what the nearest measured runs leave open, and noise."""
        fit, found = self.fits[metric], np.zeros(len(places))
        reach = reaches(self.points, fit.reach)
        measured, noise = self._places * reach, fit.noise**2 / np.array(fit.votes)
        count = min(NEAREST, len(measured))
        for at in range(0, len(places), CHUNK):
            far = squares(places[at : at + CHUNK] * reach, measured)
            near = np.argpartition(far, count - 1, axis=1)[:, :count]
            toward = fit.spread**2 * alike(np.take_along_axis(far, near, axis=1))
            rows = measured[near]  # (deployments, nearest, coordinates)
            lengths = (rows * rows).sum(2)
            between = lengths[:, :, None] + lengths[:, None] - 2 * rows @ rows.transpose(0, 2, 1)
            gram = fit.spread**2 * alike(np.maximum(between, 0.0))
            gram[:, range(count), range(count)] += noise[near]
            told = (toward * np.linalg.solve(gram, toward[..., None])[..., 0]).sum(1)
            found[at : at + CHUNK] = np.sqrt(np.maximum(fit.spread**2 - told, 0.0) + fit.noise**2)
        return found


class Recorded(msgspec.Struct, frozen=True):
    """One kind of model in the file."""

    points: Points
    fits: dict[str, Process]


@cache
def corrections(path: Path = FILE) -> dict[str, Correction]:
    """The committed corrections by kind of model."""
    stored = msgspec.json.decode(gzip.decompress(path.read_bytes()), type=dict[str, Recorded])
    return {kind: Correction(one.points, one.fits) for kind, one in stored.items()}


def save(found: dict[str, Correction], path: Path = FILE) -> None:
    """Write what `corrections` reads."""
    stored = {kind: Recorded(one.points, one.fits) for kind, one in found.items()}
    path.write_bytes(gzip.compress(msgspec.json.encode(stored), 9, mtime=0))
