"""`calibrated` mode: an estimate with its range where measured runs support one, else a bound and the reason.

The constants, the residuals the ranges come from, and the region they were validated in lie in `calibration.json`
beside this file, written by `benchmarks/fit_planner.py` and by nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from headway.roofline.constants import family, ideal, resolve
from headway.roofline.deployment import Deployment, quantities
from headway.roofline.hardware import Hardware
from headway.roofline.loop import Loop
from headway.roofline.step import Efficiency
from headway.shape.model import ModelShape

FILE = Path(__file__).with_name("calibration.json")
METRICS = ("tpot", "ttft")
TERMS = ("matmuls", "cache", "all_reduce", "launch", "host", "prompts")


class Range(msgspec.Struct, frozen=True):
    """Seconds: the estimate `p50`, and the range that held 80 % of runs left out of the fit."""

    p10: float
    p50: float
    p90: float


class Estimate(msgspec.Struct, frozen=True):
    """What is known about a deployment.

    Attributes:
        label: "estimate", or "bound" when the model abstains.
        tpot, ttft: ranges in seconds, None when it abstains.
        bound_tpot, bound_ttft: seconds no deployment of this kind can beat without drafts: peak rates, no overhead, no
            interference.
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
    groups: tuple[str, ...]  # model, system and engine of runs in the fit: narrower ranges


class Calibration(msgspec.Struct, frozen=True):
    """Fitted constants and what they were fitted on.

    Attributes:
        source: provenance: file, rows, date, licence.
        offsets: kind of model -> constant -> level label -> offset (see `constants.py`).
        spread: metric -> class of deployment -> (10th, 90th percentile of log(measured / predicted)), from runs left
            out of the fit. The class says dense or moe, and whether runs of this model, system and engine were fitted.
        region: where it may be used.
    """

    source: dict[str, str]
    offsets: dict[str, dict[str, dict[str, float]]]
    spread: dict[str, dict[str, tuple[float, float]]]
    region: Region

    def predict(self, deployment: Deployment) -> Estimate:
        """The estimate for one deployment, or its bound with the reason for abstaining."""
        return self.predict_all([deployment])[0]

    def predict_all(self, deployments: Sequence[Deployment], doubts: Sequence[str] = ()) -> list[Estimate]:
        """The same for many: one evaluation of arrays. `doubts`: further reasons to abstain, "" for none."""
        if not deployments:
            return []
        reasons = [self.outside(deployment) for deployment in deployments]
        reasons = [doubt or reason for doubt, reason in zip(doubts or [""] * len(reasons), reasons, strict=True)]
        columns = quantities(deployments)
        bounds = Loop(columns, ideal(len(deployments))).solve()
        found = Loop(columns, resolve(self.offsets, deployments)).solve()
        return [
            self._estimate(deployment, reason, bounds, found, index)
            for index, (deployment, reason) in enumerate(zip(deployments, reasons, strict=True))
        ]

    def _estimate(
        self,
        deployment: Deployment,
        reason: str,
        bounds: Mapping[str, np.ndarray],
        found: Mapping[str, np.ndarray],
        index: int,
    ) -> Estimate:
        floor_tpot, floor_ttft = (float(bounds[metric][index]) for metric in METRICS)
        if reason:
            return Estimate("bound", floor_tpot, floor_ttft, reason=reason)
        tpot, ttft = (self._range(metric, deployment, float(found[metric][index])) for metric in METRICS)
        gain = float(found["tpot"][index]) / sum(float(found[name][index]) for name in TERMS)  # of drafts
        terms = {name: gain * float(found[name][index]) for name in TERMS}
        return Estimate("estimate", floor_tpot, floor_ttft, tpot, ttft, terms=terms)

    def _range(self, metric: str, deployment: Deployment, middle: float) -> Range:
        low, high = self.spread[metric][spread_class(deployment, group_of(deployment) in self.region.groups)]
        return Range(middle * float(np.exp(low)), middle, middle * float(np.exp(high)))

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
            plan = deployment.memory
            need, kept, most = (x / 1e9 for x in (plan.weights, plan.activations + plan.reserve, plan.usable))
            return (
                f"does not fit: {need:.0f} GB of weights per GPU, {kept:.1f} GB in reserve and the cache of a request "
                f"are more than the {most:.1f} GB of memory"
            )
        for name in ("prompt", "output", "concurrency", "gpus"):
            least, most = getattr(region, name)
            if not least <= getattr(deployment, name) <= most:
                return f"{name} {getattr(deployment, name):g} is outside the measured {least:g} to {most:g}"
        return ""

    def efficiency(
        self, shape: ModelShape, hardware: Hardware, engine: str, precision: str = "bf16", gpus: int = 1
    ) -> Efficiency:
        """The constants as `StepTime` takes them: for estimates of single steps, in the planner and the simulator.

        The all-reduce is not among them; `StepTime` has its own model of it.
        """
        deployment = Deployment(shape, hardware, engine, 1.0, 1024.0, 1024.0, precision=precision, gpus=gpus)
        value = {name: float(column[0]) for name, column in resolve(self.offsets, [deployment]).items()}
        layer = value["layer"] + value["moe_layer"] * (shape.moe.layers / shape.layers if shape.moe else 0.0)
        return Efficiency(
            stream=value["stream"], stream_experts=value["stream_experts"], stream_cache=value["stream_cache"],
            linear=value["linear"], experts=value["expert_linear"], attention=value["attention"],
            prefill_attention=value["prefill_attention"], step=value["step"], layer=layer, row=value["row"],
        )  # fmt: skip


def group_of(deployment: Deployment) -> str:
    """Model, system and engine: what is left out together, and what a narrower range is earned by."""
    return f"{deployment.shape.name} {deployment.hardware.name} {deployment.engine}"


def spread_class(deployment: Deployment, seen: bool) -> str:
    """Key of the residuals a deployment's range comes from."""
    if deployment.disaggregated or deployment.speculation == "unrecorded":
        split = "disaggregated" if deployment.disaggregated else "aggregated"
        kind = f"{deployment.kind} {split}, drafts {deployment.speculation}"
    else:
        kind = deployment.kind
    return f"{kind}, {'fitted' if seen else 'new'} group"


@cache
def calibration(path: Path = FILE) -> Calibration:
    """The committed calibration."""
    return msgspec.json.decode(path.read_bytes(), type=Calibration)
