"""Interactivity against throughput as the batch grows (SPEC E3): `plan frontier`'s own curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import BadInput
from headway.plan.runs import read_runs
from headway.plan.setup import Setup
from headway.plan.steps import frontier as curve
from headway.report.units import seconds as duration
from headway.roofline.frontier import default_batches
from headway.roofline.replica import decode

MOST_BATCH = 4096


class Frontier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is looked at. `batch`: the dot on the curve."""

    model: str = "llama-3.1-8b"
    hardware: str = "h100-sxm"
    gpus: int = 1
    context: int = 4096
    batch: int = 32
    kv: str = "bf16"
    precision: str = ""

    def __post_init__(self) -> None:
        if not 1 <= self.batch <= MOST_BATCH:
            raise BadInput("batch", f"{self.batch} is not a whole number from 1 to {MOST_BATCH}")


def answer(asked: Frontier, runs: Path | None = None) -> dict[str, Any]:
    """The curve, its landmarks, the dot, and measured runs of this model on this device.

    Args:
        runs: a table of measured runs, as `headway plan score` reads it; None = there are none to lay over it.
    """
    setup = Setup(
        model=asked.model, hardware=asked.hardware, gpus=asked.gpus, kv=asked.kv, precision=asked.precision or None,
        mode="exact",
    )  # fmt: skip
    replica = setup.replica(("exact",))
    batches = sorted({*default_batches(MOST_BATCH), asked.batch})
    found = curve(setup, asked.context, batches)
    cost = decode(replica, asked.batch, asked.context)
    dot = next(point for point in found.points if point.batch == asked.batch)
    return {
        "points": [msgspec.to_builtins(point) for point in found.points], "dot": msgspec.to_builtins(dot),
        "terms": cost.terms, "knee": found.knee, "critical_context": found.critical_context,
        "ceiling": found.ceiling, "fits": found.fits_batch, "measured": [] if runs is None else measured(asked, runs),
        "see": _see(asked, dot.seconds, dot.tokens_per_second_per_gpu, cost.binds, cost.largest, found.fits_batch),
    }  # fmt: skip


def measured(asked: Frontier, runs: Path) -> list[dict[str, Any]]:
    """Runs of the table that are of this model, device and number of GPUs."""
    found, _ = read_runs(runs)
    return [
        {"label": f"{run.backend}, {run.deployment.concurrency:.0f} in flight", "user": 1 / run.tpot,
         "gpu": run.deployment.concurrency / run.tpot / run.deployment.gpus}
        for run in found
        if run.deployment.hardware.name == asked.hardware and run.deployment.gpus == asked.gpus
        and asked.model.lower() in (run.deployment.shape.name.lower(), run.model.lower())
    ]  # fmt: skip


def _see(asked: Frontier, seconds: float, per_gpu: float, binds: str, largest: str, fits: int) -> str:
    told = (
        f"{asked.batch} sequences of {asked.context:,} tokens: a step takes {duration(seconds)}, so each user gets "
        f"{1 / seconds:,.0f} tokens/s and each GPU makes {per_gpu:,.0f}; {binds} binds, most of it {largest}."
    )
    if asked.batch > fits:
        return f"{told} It does not fit: memory holds {fits}."
    return f"{told} Memory holds {fits}."
