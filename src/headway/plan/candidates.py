"""Replicas to try for some traffic: every device, GPU count, layout and precision, each put through the closed loop."""

from __future__ import annotations

from math import inf

import msgspec

from headway.plan.answers_lists import Rejected
from headway.plan.estimates import calibrated_step, served
from headway.plan.load import Curve, curves, measured_curve
from headway.plan.quotes import GIVEN, Quote
from headway.plan.traffic import Traffic
from headway.roofline.deployment import Deployment, Pool
from headway.roofline.hardware import BASES, Hardware
from headway.roofline.profile import Profile
from headway.roofline.replica import Replica, deploy
from headway.roofline.step import fits_layout
from headway.roofline.timing import served_here
from headway.roofline.work import Layout
from headway.shape.formats import find_format
from headway.shape.model import ModelShape

DEGREES = (1, 2, 4, 8)
NODES = (16, 32)  # GPUs of replicas larger than a node


class Wanted(msgspec.Struct, frozen=True):
    """What to search over.

    Attributes:
        hardware: devices. precisions: of the weights; "stored" = as the checkpoint has them. kv: of the cache.
        degrees: GPUs of one replica. split: also consider separate prefill and decode pools.
        prefill_hardware: devices of a prefill pool; () = those of `hardware`.
        budget: most dollars per hour. prices: dollars per GPU-hour by device, in place of the catalogue's.
        basis: of the catalogue's prices, one for the whole ranking.
        most: deployments to list.
        engine: whose calibrated constants to take.
        profile: of the measured machine among the hardware, by whose own steps it is judged.
    """

    hardware: tuple[Hardware, ...]
    precisions: tuple[str, ...] = ("stored",)
    kv: str | None = None
    degrees: tuple[int, ...] = DEGREES
    split: bool = True
    budget: float | None = None
    prices: dict[str, float] = {}
    basis: str = BASES[0]
    most: int = 10
    engine: str = "vllm"
    profile: Profile | None = None
    prefill_hardware: tuple[Hardware, ...] = ()


class Candidate(msgspec.Struct, frozen=True):
    """One way to build a replica, which computes its own prompts, and the same as one of a pool that only decodes.
    `basis`: where its constants are from. `profile`: of the machine whose own steps they are, where they are."""

    device: Hardware
    precision: str
    mixed: Curve
    decode: Curve
    basis: str
    profile: Profile | None = None

    @property
    def deployment(self) -> Deployment:
        return self.mixed.deployment

    @property
    def name(self) -> str:
        return f"{self.deployment.gpus} x {self.device.name} {self.precision} {spread(self.deployment.layout)}"


def candidates(shape: ModelShape, traffic: Traffic, wanted: Wanted) -> tuple[list[Candidate], list[Rejected]]:
    """Every replica to try, and why others are left out."""
    tried: list[tuple[Hardware, str, Deployment]] = []
    rejected: list[Rejected] = []
    for device in {d.name: d for d in (*wanted.hardware, *wanted.prefill_hardware)}.values():
        if not device.peaks:
            rejected.append(Rejected(device.name, "no peak arithmetic is catalogued: prefill cannot be timed"))
            continue
        for precision in wanted.precisions:
            label = shape.weight_format if precision == "stored" else precision
            find_format(label)
            fitting = False
            for gpus in (*wanted.degrees, *NODES):
                beyond = gpus not in wanted.degrees  # a node: only where one, tried, does not hold the weights
                if beyond and (fitting or not _nodes_of(device) or not _whole_node(device, wanted)):
                    continue
                name = f"{gpus} x {device.name} {label}"
                found_layouts, why = layouts(shape, device, gpus)
                if not found_layouts:
                    if not beyond:
                        rejected.append(Rejected(name, why))
                    continue
                for layout in found_layouts:
                    one = served(
                        shape, device, wanted.engine, label, gpus, 1, traffic.input_tokens, traffic.output_tokens,
                        wanted.kv, layout,
                    )  # fmt: skip
                    fitting |= one.memory.room > 0
                    cached = traffic.input_tokens - traffic.fresh_tokens
                    tried.append((device, label, msgspec.structs.replace(one, cached=cached)))
    alone = [
        msgspec.structs.replace(d, prefill=Pool(d.layout.stage, d.attention_dp, d.expert_parallel, inf))
        for _, _, d in tried
    ]
    loaded = curves([*(d for _, _, d in tried), *alone])
    found = [
        Candidate(device, label, mixed, decode, _basis(mixed.deployment))
        for (device, label, _), mixed, decode in zip(tried, loaded[: len(tried)], loaded[len(tried) :], strict=True)
    ]
    return [_as_measured(one, wanted) for one in found], rejected


def _nodes_of(device: Hardware) -> bool:
    """Are these devices put together to nodes with a network port each, so that replicas may be larger than one?"""
    return device.link is not None and device.link.group >= 8 and not device.link.name.startswith("PCIe")


def _whole_node(device: Hardware, wanted: Wanted) -> bool:
    return device.link is not None and device.link.group in wanted.degrees


def layouts(shape: ModelShape, device: Hardware, gpus: int) -> tuple[list[Layout], str]:
    """Ways to spread a replica that are worth trying, or why there is none: tensor parallelism inside one group of
    links; data-parallel attention for mixtures whose cache heads do not divide; between nodes also stages."""
    group = device.link.group if device.link else 1
    latent = any(one.kind == "latent" for one in shape.groups)
    if gpus > group and (gpus % group or not _nodes_of(device)):
        return [], f"links join {group} of these devices at most"
    experts, nodes = gpus if shape.is_moe else 1, max(1, gpus // group)
    asked = [Layout(gpus)] if nodes == 1 else [Layout(gpus), Layout(gpus, pipeline=nodes)]
    if latent and gpus > 1:
        asked.append(Layout(gpus, gpus, experts))
    if shape.is_moe and nodes > 1:
        asked.append(Layout(gpus, nodes, experts))
    fitting = [layout for layout in dict.fromkeys(asked) if fits_layout(shape, layout)]
    return fitting, "" if fitting else f"{shape.heads} heads cannot be split over {gpus} GPUs"


def spread(layout: Layout) -> str:
    """A layout in few words."""
    stages = f" x PP{layout.pipeline}" if layout.pipeline > 1 else ""
    ranks = f" with DP{layout.attention_dp} attention" if layout.attention_dp > 1 else ""
    experts = f", EP{layout.expert_parallel}" if layout.expert_parallel > 1 else ""
    return f"TP{layout.stage}{stages}{ranks}{experts}"


def _as_measured(c: Candidate, wanted: Wanted) -> Candidate:
    """By its own steps, where the device is the measured machine and such steps were timed."""
    if wanted.profile is None or c.device.name != wanted.profile.name:
        return c
    d = c.deployment
    replica = deploy(d.shape, c.device, d.gpus, precision=d.precision, mode=Replica)
    timing = served_here(replica.shape, wanted.profile, replica.step_time())
    if timing.label == "bound":
        return c
    curve = measured_curve(timing, d)
    return msgspec.structs.replace(c, mixed=curve, decode=curve, basis="measured", profile=wanted.profile)


def _basis(deployment: Deployment) -> str:
    """Was the engine measured on such a device?"""
    reason = calibrated_step(
        deployment.shape, deployment.hardware, deployment.engine, deployment.precision, deployment.layout
    )[1]
    return "extrapolated" if reason else "calibrated"


def price_of(device: Hardware, wanted: Wanted) -> Quote | None:
    """Per GPU-hour, the user's figure first, else on the one basis of this ranking."""
    for name, price in wanted.prices.items():
        if name == device.name or name in device.aliases:
            return Quote(device, price, GIVEN, GIVEN)
    known = device.price.get(wanted.basis)
    return Quote(device, known.typical, wanted.basis, known.source) if known else None
