"""`calibrated` mode: an estimate with its range where measured runs support one, else a bound and the reason.

The constants, the residuals the ranges come from, and the region they were validated in lie in `calibration.json`
beside this file, written by `benchmarks/fit_planner.py` and by nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import exp
from pathlib import Path

import msgspec
import numpy as np

from headway.roofline.collectives import AllReduce
from headway.roofline.constants import family, resolve
from headway.roofline.deployment import Deployment
from headway.roofline.loop import PARTS, Columns, Fleet, Loop, constants
from headway.roofline.residual import Correction, corrections
from headway.roofline.served import METRICS, served
from headway.roofline.step import Efficiency
from headway.roofline.timing import Range

FILE = Path(__file__).with_name("calibration.json")


class Estimate(msgspec.Struct, frozen=True):
    """What is known about a deployment.

    Attributes:
        label: "estimate", or "bound" when the model abstains.
        tpot, ttft: ranges in seconds, None when it abstains.
        bound_tpot, bound_ttft: seconds no deployment of this kind can beat: peak rates, drafts all accepted, no
            overhead, no interference.
        reason: why it abstains, "" when it does not.
        terms: seconds per token of each part of a decode step, and of prompts beside it, that add up to the TPOT;
            empty when it abstains.
    """

    label: str
    bound_tpot: float
    bound_ttft: float
    tpot: Range | None = None
    ttft: Range | None = None
    reason: str = ""
    terms: dict[str, float] = {}


class Region(msgspec.Struct, frozen=True):
    """Where measured runs were: outside, the model abstains. Ranges are (least, most) of the fitted rows."""

    engines: tuple[str, ...]
    families: tuple[str, ...]
    precisions: tuple[str, ...]  # "fp8 hopper"
    prompt: tuple[float, float]
    output: tuple[float, float]
    concurrency: tuple[float, float]
    gpus: tuple[float, float]
    seen: dict[str, tuple[str, ...]]  # level of `SEEN` -> names of it in the fit


class Calibration(msgspec.Struct, frozen=True):
    """Fitted constants and what they were fitted on.

    Attributes:
        source: provenance: file, rows, date, licence.
        offsets: kind of model -> constant -> level label -> offset (see `constants.py`).
        spread: metric -> class of deployment -> (10th, 90th percentile of log(measured / predicted) over the deviation
            that the correction expects), from runs left out of the fit. The class says dense or moe, and what is new
            about the deployment.
        region: where it may be used.
    """

    source: dict[str, str]
    offsets: dict[str, dict[str, dict[str, float]]]
    spread: dict[str, dict[str, tuple[float, float]]]
    region: Region

    def predict(self, deployment: Deployment) -> Estimate:
        """The estimate for one deployment, or its bound with the reason for abstaining."""
        return self.predict_all([deployment])[0]

    def predict_all(
        self,
        deployments: Sequence[Deployment],
        doubts: Sequence[str] = (),
        known: Mapping[str, Correction] | None = None,
    ) -> list[Estimate]:
        """The same for many: one evaluation of arrays. `doubts`: further reasons to abstain, "" for none. `known`:
        corrections in place of the committed ones."""
        if not deployments:
            return []
        reasons = [self.outside(deployment) for deployment in deployments]
        reasons = [doubt or reason for doubt, reason in zip(doubts or [""] * len(reasons), reasons, strict=True)]
        bounds = Loop.bound(Fleet.of(deployments)).solve()
        inside = [index for index, reason in enumerate(reasons) if not reason]
        known = corrections() if known is None else known
        found = served(self.offsets, [deployments[index] for index in inside], known)
        at = {index: row for row, index in enumerate(inside)}
        return [
            self._estimate(deployment, reason, bounds, found, index, at.get(index, -1))
            for index, (deployment, reason) in enumerate(zip(deployments, reasons, strict=True))
        ]

    def _estimate(
        self, deployment: Deployment, reason: str, bounds: Columns, found: Columns, index: int, row: int
    ) -> Estimate:
        """Of one: `index` among the bounds, `row` among what was found."""
        floor_tpot, floor_ttft = (float(bounds[metric][index]) for metric in METRICS)
        if reason:
            return Estimate("bound", floor_tpot, floor_ttft, reason=reason)

        def around(metric: str, floor: float) -> Range:
            middle = max(floor, float(found[metric][row]))
            low, high = self.range(metric, deployment, float(found[f"deviation_{metric}"][row]))
            return Range(middle * low, middle, middle * high)

        tpot, ttft = around("tpot", floor_tpot), around("ttft", floor_ttft)
        scale = tpot.p50 / float(found["tpot"][row])
        terms = {name: scale * float(found[name][row]) for name in PARTS}
        return Estimate("estimate", floor_tpot, floor_ttft, tpot, ttft, terms=terms)

    def range(self, metric: str, deployment: Deployment, deviation: float) -> tuple[float, float]:
        """p10 and p90 over the estimate, whose logarithm is expected to be so far off."""
        low, high = self.spread[metric][spread_class(deployment, novelty(deployment, self.region))]
        return exp(low * deviation), exp(high * deviation)

    def outside(self, deployment: Deployment) -> str:
        """Why this deployment is outside the validated region; "" if it is inside."""
        region, device = self.region, deployment.hardware
        if deployment.engine not in region.engines:
            return f"no measured runs of engine {deployment.engine}; there are of {', '.join(region.engines)}"
        if family(device.name) not in region.families:
            return f"no measured runs on {device.name}; there are on {', '.join(region.families)} devices"
        precision = f"{deployment.precision} {family(device.name)}"
        if precision not in region.precisions:
            return f"no measured runs of {precision}; there are of {', '.join(region.precisions)}"
        if not deployment.fits:
            return does_not_fit(deployment)
        if deployment.pipeline > 1:
            return "no measured runs with pipeline parallelism"
        for name in ("prompt", "output", "concurrency", "gpus"):
            least, most = getattr(region, name)
            if not least <= getattr(deployment, name) <= most:
                return f"{name} {getattr(deployment, name):g} is outside the measured {least:g} to {most:g}"
        return ""

    def constants(self, deployment: Deployment) -> tuple[Efficiency, AllReduce]:
        """The constants as `StepTime` takes them: for single steps, in the planner and the simulator."""
        columns = constants(Fleet.of([deployment]), resolve(self.offsets, [deployment]))
        return tuple(
            msgspec.structs.replace(one, **{
                name: float(value[0]) for name, value in msgspec.structs.asdict(one).items()
                if isinstance(value, np.ndarray)
            })
            for one in columns
        )  # type: ignore[return-value]  # fmt: skip


def does_not_fit(deployment: Deployment) -> str:
    """With its figures."""
    plan = deployment.memory
    need, kept, most = (x / 1e9 for x in (plan.weights, plan.activations + plan.reserve, plan.usable))
    return (
        f"does not fit: {need:.0f} GB of weights per GPU, {kept:.1f} GB in reserve and the cache of a request "
        f"are more than the {most:.1f} GB of memory"
    )


def _model(d: Deployment) -> str:
    """Models of one shape are one model."""
    return f"{d.shape.n_params / 1e9:.4g}B"


def _cell(d: Deployment) -> str:
    return f"{d.engine} {d.precision} {family(d.hardware.name)}"


# What a fit may have seen of a deployment, and how its range is named where that is the first it has not seen. Each
# name's residuals are of runs predicted without any run of the same.
SEEN: dict[str, Callable[[Deployment], str]] = {
    "cell": _cell,
    "model": _model,
    "system": lambda d: d.hardware.name,
    "group": lambda d: f"{_model(d)} {d.hardware.name} {d.engine} {d.precision}",
}
FITTED = "fitted"


def novelty(deployment: Deployment, region: Region) -> str:
    """What is new about a deployment: its engine on this precision and family of devices ("cell"), its model, its
    system, these together ("group"), or nothing ("fitted")."""
    return next((level for level, of in SEEN.items() if of(deployment) not in region.seen[level]), FITTED)


LOADS = ("", " disaggregated", ", drafts unrecorded", " disaggregated, drafts unrecorded")


def spread_class(deployment: Deployment, new: str) -> str:
    """Key of the residuals a deployment's range comes from: one of `LOADS` after its kind, and what is new about it."""
    apart = " disaggregated" if deployment.disaggregated else ""
    drafts = ", drafts unrecorded" if deployment.drafts is None else ""
    return f"{deployment.kind}{apart}{drafts}: {new}"


@cache
def calibration(path: Path = FILE) -> Calibration:
    """The committed calibration."""
    return msgspec.json.decode(path.read_bytes(), type=Calibration)
