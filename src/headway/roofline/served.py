"""Served requests as the planner states them: the closed loop of the physics, corrected by what measured runs say.

`estimate`, `search` and `score` all ask here. Time per token never falls as load grows, whatever runs seem to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, log2
from typing import Any

import numpy as np

from headway.roofline.constants import Offsets, resolve
from headway.roofline.deployment import Deployment
from headway.roofline.loop import Columns, Fleet, Loop
from headway.roofline.residual import LOAD, Correction

METRICS = ("tpot", "ttft")
CROSSED = 0.2  # most of a correction's logarithm where no run is of the very group: none that was validated says more
STEPS = 2  # loads per doubling at which a correction is held to be no quicker than below
CAUTION = 0.5  # of TTFT's variance: the estimate that errs least is below the middle of so skewed a quantity


class Corrected:
    """Corrections of deployments, which may be of both kinds, by row.

    Attributes:
        known: by metric, which have runs to be corrected by; others are left to the physics.
    """

    def __init__(self, deployments: Sequence[Deployment], corrections: Mapping[str, Correction]) -> None:
        self.count = len(deployments)
        self.known = {metric: np.zeros(self.count, bool) for metric in METRICS}
        self.parts: list[tuple[Correction, np.ndarray, np.ndarray]] = []
        for kind, correction in corrections.items():
            rows = np.array([i for i, d in enumerate(deployments) if d.kind == kind], int)
            if len(rows):
                mine = [deployments[i] for i in rows]
                for metric, known in self.known.items():
                    known[rows] = correction.measured(metric, mine)
                self.parts.append((correction, rows, correction.places(mine)))

    def log(self, metric: str, rows: np.ndarray | None = None, loads: np.ndarray | None = None) -> np.ndarray:
        """The correction of `rows` (all of them) at their own loads, or at others; `CROSSED` at most of a group that no
        run is of, whose names were measured in others: what one disturbed series says of a device is not the device's.
        """
        wanted = np.arange(self.count) if rows is None else rows
        found = np.zeros(len(wanted))
        for correction, mine, places in self.parts:
            where = np.full(self.count, -1)
            where[mine] = np.arange(len(mine))
            chosen = np.flatnonzero(where[wanted] >= 0)
            at = places[where[wanted[chosen]]]
            if loads is not None:
                at[:, LOAD] = np.log2(loads[chosen])
            found[chosen] = correction.log(metric, at)
        group = self.known["ttft"][wanted]  # which nothing but the very group makes known
        return np.where(self.known[metric][wanted], np.where(group, found, found.clip(-CROSSED, CROSSED)), 0.0)

    def deviation(self, metric: str) -> np.ndarray:
        """Standard deviation of each one's logarithm."""
        found = np.zeros(self.count)
        for correction, mine, places in self.parts:
            found[mine] = correction.deviation(metric, places)
        return found


def at_loads(fleet: Fleet, rows: np.ndarray, loads: np.ndarray, chunks: np.ndarray | None = None) -> Fleet:
    """`rows` of a fleet with other requests in flight, and other chunks of prompts."""
    taken = fleet[rows]
    for part in (taken, taken.prompts):
        if part is not None:
            part.load["concurrency"] = loads
            if chunks is not None:
                part.load["chunk"] = chunks
    return taken


def tokens(offsets: Offsets, deployments: Sequence[Deployment], corrections: Mapping[str, Correction]) -> np.ndarray:
    """Seconds per token of each deployment at its load: the slowest of all lower loads, of which there are `STEPS` per
    doubling, between which it is interpolated."""
    series: dict[Any, list[int]] = {}
    for index, deployment in enumerate(deployments):
        series.setdefault(but_load(deployment), []).append(index)
    bases = [deployments[mine[0]] for mine in series.values()]
    tops = [ceil(STEPS * log2(max(1.0, *(deployments[i].concurrency for i in mine)))) for mine in series.values()]
    rows = np.repeat(np.arange(len(bases)), [top + 1 for top in tops])
    loads = np.concatenate([2 ** (np.arange(top + 1) / STEPS) for top in tops])
    constants = resolve(offsets, bases)
    loop = Loop.calibrated(
        at_loads(Fleet.of(bases), rows, loads), {name: column[rows] for name, column in constants.items()}
    )
    logs = np.log(loop.tokens()["tpot"]) + Corrected(bases, corrections).log("tpot", rows, loads)
    found, start = np.zeros(len(deployments)), 0
    for mine, top in zip(series.values(), tops, strict=True):
        ladder = np.maximum.accumulate(logs[start : start + top + 1])
        own = np.log2([max(1.0, deployments[i].concurrency) for i in mine]) * STEPS
        found[mine] = np.interp(own, np.arange(top + 1), ladder)
        start += top + 1
    return np.exp(found)


def but_load(deployment: Deployment) -> tuple[Any, ...]:
    """What was deployed, whatever its load."""
    return tuple(
        id(getattr(deployment, field)) if field in ("shape", "hardware") else getattr(deployment, field)
        for field in deployment.__struct_fields__
        if field != "concurrency"
    )


def served(offsets: Offsets, deployments: Sequence[Deployment], corrections: Mapping[str, Correction]) -> Columns:
    """Seconds of each metric at the deployments' loads, the `deviation_` of its logarithm, and the parts of a token."""
    if not deployments:
        return {}
    loop = Loop.calibrated(Fleet.of(deployments), resolve(offsets, deployments))
    solved, corrected = loop.solve(), Corrected(deployments, corrections)
    found = {f"deviation_{metric}": corrected.deviation(metric) for metric in METRICS}
    found["tpot"] = tokens(offsets, deployments, corrections)
    below = np.where(corrected.known["ttft"], CAUTION * found["deviation_ttft"] ** 2, 0.0)
    found["ttft"] = solved["ttft"] * np.exp(corrected.log("ttft") - below)
    gain = found["tpot"] / solved["tpot"]
    return found | {name: gain * part for name, part in loop.parts(solved).items()}
