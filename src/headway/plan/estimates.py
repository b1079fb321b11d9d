"""From bound to estimate: calibrated steps and served requests, with their range, or a bound and why it abstains."""

from __future__ import annotations

import msgspec

from headway.core.errors import BadInput
from headway.plan.answers import Served
from headway.plan.measured import loop_of
from headway.plan.setup import Setup
from headway.roofline.calibrate import Estimate, calibration, does_not_fit
from headway.roofline.collectives import AllReduce
from headway.roofline.deployment import Deployment
from headway.roofline.hardware import Hardware
from headway.roofline.step import Efficiency, decode_step
from headway.roofline.timing import Timing
from headway.roofline.work import Layout
from headway.shape.formats import known_format, nominal_bytes
from headway.shape.model import ModelShape

ENGINES = ("vllm", "sglang", "trtllm")


class Calibrated(msgspec.Struct, frozen=True):
    """What the calibration says of steps of one deployment: constants, and the engine's own all-reduce (None on a
    device without links). No range: what was measured is served requests, and ranges are of those."""

    efficiency: Efficiency
    all_reduce: AllReduce | None


def calibrated_step(
    shape: ModelShape, hardware: Hardware, engine: str, precision: str, layout: Layout
) -> tuple[Calibrated | None, str]:
    """The calibrated constants, or None and the reason for abstaining."""
    known = calibration()
    deployment = served(shape, hardware, engine, precision, layout.gpus, 1, 1024, 1024, None, layout)
    reason = known.outside(msgspec.structs.replace(deployment, concurrency=known.region.concurrency[0]))
    if reason:
        return None, reason
    efficiency, all_reduce = known.constants(deployment)
    return Calibrated(efficiency, all_reduce if hardware.link else None), ""


def served(
    shape: ModelShape, hardware: Hardware, engine: str, precision: str, gpus: int, concurrency: float,
    input_tokens: float, output_tokens: float, kv: str | None = None, layout: Layout | None = None,
) -> Deployment:  # fmt: skip
    """A deployment as the calibration describes it: a closed loop of equal requests.

    Raises:
        BadInput: an unknown engine, or numbers that are none.
    """
    if engine not in ENGINES:
        raise BadInput("--engine", f"{engine!r}; accepted: {', '.join(ENGINES)}")
    for field, value in (
        ("--concurrency", concurrency), ("--input-tokens", input_tokens), ("--output-tokens", output_tokens),
        ("--gpus", gpus),
    ):  # fmt: skip
        if not 0 < value < float("inf"):
            raise BadInput(field, f"{value:g}; accepted: a number above 0")
    width = nominal_bytes(kv, "--kv") if kv else shape.kv_width or 2.0
    format, spread = known_format(precision), layout or Layout(gpus)
    return Deployment(
        shape, hardware, engine, concurrency, input_tokens, output_tokens,
        precision=format.measured if format and format.measured else precision, cache_bytes=width, gpus=gpus,
        attention_dp=spread.attention_dp, expert_parallel=spread.expert_parallel, pipeline=spread.pipeline,
    )  # fmt: skip


def estimate(setup: Setup, concurrency: int = 64, input_tokens: int = 2000, output_tokens: int = 500) -> Served:
    """TTFT and TPOT of served requests with p10-p90 ranges, or bounds and the reason for abstaining."""
    replica = setup.replica(("textbook", "exact", "calibrated"))
    setup.needs_peak(replica)  # of prompts
    deployment = served(
        replica.shape, replica.hardware, setup.engine, replica.precision, setup.gpus, concurrency, input_tokens,
        output_tokens, setup.kv, replica.layout,
    )  # fmt: skip
    here = setup.measured(replica)
    found = calibration().predict(deployment) if here is None else _here(here, deployment)
    tpot = found.tpot.p50 if found.tpot else found.bound_tpot
    request = (found.ttft.p50 if found.ttft else found.bound_ttft) + output_tokens * tpot  # seconds of one
    about = msgspec.structs.replace(setup, mode="calibrated").about(
        replica, (), (f"{concurrency:g} equal requests always in flight: a closed loop (--concurrency)",),
        "exact" if found.reason else "measured" if here else "", input_tokens + output_tokens,
    )  # fmt: skip
    return Served(
        **about | {"precision": deployment.precision, "kind": found.label, "memory": deployment.memory},
        engine=deployment.engine if here is None else "headway",
        concurrency=concurrency, input_tokens=input_tokens, output_tokens=output_tokens, tpot=found.tpot,
        ttft=found.ttft, bound_tpot=found.bound_tpot, bound_ttft=found.bound_ttft, abstained=found.reason,
        seconds=tpot, tokens_per_second=concurrency * output_tokens / request, terms=found.terms,
    )  # fmt: skip


def _here(timing: Timing, deployment: Deployment) -> Estimate:
    """What our own engine does on a measured machine; where no steps of such weights were fitted, the bound."""
    reason = timing.reason or ("" if deployment.fits else does_not_fit(deployment))
    (bound,) = calibration().predict_all([deployment], [reason or "what is known of other engines is not asked for"])
    if reason:
        return bound
    prompt, output = round(deployment.prompt), round(deployment.output)
    load = loop_of(timing, deployment).at(deployment.concurrency)
    terms = timing.model.met(decode_step(timing.model.shape, load.batch, prompt + output / 2))
    return Estimate(
        "estimate", bound.bound_tpot, bound.bound_ttft, timing.range(load.tpot), timing.range(load.ttft),
        terms=terms | {"prompts": load.prompts},
    )  # fmt: skip
