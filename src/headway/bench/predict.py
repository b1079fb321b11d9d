"""The step-time model's word beside each measured number, and how much of the machine was used.

Of a machine that `headway probe` timed steps on, the prediction is an *estimate* with the range of 80 % of steps; of
any other it is a *bound*: peak rates, no host. Neither has a queue or interference in it. What a measurement has beyond
it is named `unexplained`, not explained away; for the time to first token it holds the queue. The batch and the
context are the measured ones, so a disagreement is one about the step, not about the traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from headway.core.errors import BadInput
from headway.core.step import StepShape
from headway.metrics.records import TOKEN_KINDS, RequestRecord
from headway.metrics.run import Run
from headway.roofline.collectives import all_reduce_of
from headway.roofline.hardware import Hardware
from headway.roofline.profile import Profile
from headway.roofline.replica import Replica, deploy
from headway.roofline.step import StepCost, StepTime, check_layout, decode_step, prefill_step
from headway.roofline.timing import Timing, served_here
from headway.roofline.work import COMPUTE_TERMS, MEMORY_TERMS, Layout
from headway.shape.model import ModelShape

LABELS = {
    "estimate": "estimate: steps as `headway probe` timed them, range of 80 % of steps; no queue, scheduler or HTTP",
    "bound": "bound: peak rates, no queue, no interference, no host time",
}
HOP_SECONDS = 2e-6  # of an all-reduce over a scale-up link, where there is one


@dataclass(frozen=True)
class Backing:
    """What is behind the endpoint, as its user says: a replica, and the profile of its machine, if it was measured."""

    replica: Replica
    profile: Profile | None = None

    def timing(self) -> Timing:
        """The estimate where our own steps were timed on the machine, else the bound and why there is no estimate."""
        roof = self.replica.step_time()
        if self.profile is None:
            return Timing.bound(roof, "steps were not timed on this hardware")
        return served_here(self.replica.shape, self.profile, roof)


def backing(
    shape: ModelShape, hardware: Hardware, gpus: int = 1, precision: str | None = None, kv: str | None = None,
    profile: Profile | None = None,
) -> Backing:  # fmt: skip
    """With the precision of weights and cache named; None = as the checkpoint stores them, 16 bits.

    Raises:
        BadInput: the model cannot be split so, or nothing links the devices.
    """
    replica = deploy(shape, hardware, gpus, precision=precision, kv=kv, mode=Replica)
    check_layout(shape, Layout(gpus))
    if gpus > 1:
        if hardware.link is None:
            raise BadInput("--gpus", f"{hardware.name} has no link between devices in the catalogue; accepted: 1")
        ring = all_reduce_of("ring", hardware.link.bandwidth, HOP_SECONDS)
        replica = msgspec.structs.replace(replica, all_reduce=ring)
    return Backing(replica, profile)


def mean_batch(records: Sequence[RequestRecord]) -> float:
    """Streams that were decoding at once, as the mean token saw it: integral of n(t)^2 over integral of n(t)."""
    edges = []
    for record in records:
        first, last = record.first(TOKEN_KINDS), record.last(TOKEN_KINDS)
        if first is not None and last is not None and last > first:
            edges += [(first, 1), (last, -1)]
    edges.sort()
    streams, before, once, squared = 0, 0, 0.0, 0.0
    for at, change in edges:
        once += streams * (at - before)
        squared += streams * streams * (at - before)
        streams, before = streams + change, at
    return squared / once if once else 1.0


def predict(run: Run, summary: dict[str, Any], behind: Backing) -> dict[str, Any]:
    """The `prediction` object: per metric measured median, prediction, bound, ratio, the rest, and the terms."""
    done = [r for r in run.records if r.completed and not r.warmup and r.usage_trusted and r.prompt_tokens]
    if not done:
        return {"reason": "no request was completed with usage, so batch and context are not known"}
    timing, roof, replica = behind.timing(), behind.replica.step_time(), behind.replica
    prompt = float(np.mean([r.prompt_tokens or 0 for r in done]))
    cached = float(np.mean([r.cached_tokens or 0 for r in done]))
    output = float(np.mean([r.output_tokens or 0 for r in done]))
    batch, context = mean_batch(done), prompt + output / 2
    fresh = max(1, round(prompt - cached))
    chunk: StepShape = prefill_step(replica.shape, fresh, round(cached))
    decodes = [_decode(model, batch, round(context)) for model in (timing.model, roof)]
    prefills = [model.explain(chunk) for model in (timing.model, roof)]
    decode = decodes[0].seconds
    whole = [first.seconds + (output - 1) * each.seconds for first, each in zip(prefills, decodes, strict=True)]

    def row(name: str, predicted: Sequence[float], terms: dict[str, float]) -> dict[str, Any]:
        return _row(summary[name]["p50"], predicted, timing, terms)

    rows = {
        "ttft_ms": row("ttft_ms", [one.seconds for one in prefills], prefills[0].terms),
        "tpot_ms": row("tpot_ms", [one.seconds for one in decodes], decodes[0].terms),
        "itl_token_ms": row("itl_token_ms", [one.seconds for one in decodes], decodes[0].terms),
        "e2e_ms": row("e2e_ms", whole, {}),
    }
    return {
        "kind": timing.label,
        "label": LABELS[timing.label] + (f" ({timing.reason})" if timing.reason else ""),
        "model": replica.shape.name,
        "hardware": replica.hardware.name,
        "gpus": replica.gpus,
        "batch": batch,
        "context": context,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "binds": {"decode": decodes[1].binds, "prefill": prefills[1].binds},
        "metrics": rows,
        "output_tokens_per_second": {"measured": summary["throughput"]["output"], "at_this_batch": batch / decode},
        **_utilisation(rows, decodes[1].terms, prefills[1].terms),
    }


def _decode(model: StepTime, batch: float, context: int) -> StepCost:
    """A decode step. It has whole rows: seconds between two of them are interpolated, terms are the lower one's."""
    low = int(batch)
    first, second = (model.explain(decode_step(model.shape, rows, context)) for rows in (low, low + 1))
    seconds = first.seconds + (second.seconds - first.seconds) * (batch - low)
    return StepCost(seconds, first.binds, first.terms)


def _row(measured: float | None, predicted: Sequence[float], timing: Timing, terms: dict[str, float]) -> dict[str, Any]:
    """predicted: seconds by the prediction and by the bound."""
    said, bound = (seconds * 1e3 for seconds in predicted)
    return {
        "measured": measured,
        "predicted": said,
        "range": [said * timing.low, said * timing.high] if timing.label == "estimate" else None,
        "bound": bound,
        "measured_over_predicted": measured / said if measured is not None and said else None,
        "unexplained": measured - said if measured is not None else None,
        "terms": {name: seconds * 1e3 for name, seconds in terms.items() if seconds},
    }


def _utilisation(rows: dict[str, Any], decode: dict[str, float], prefill: dict[str, float]) -> dict[str, Any]:
    """MBU of decode (bytes of a step / TPOT / beta) and MFU of prefill (FLOPs / TTFT / pi; a queue lowers it)."""
    read = sum(seconds for name, seconds in decode.items() if name in MEMORY_TERMS) * 1e3
    work = sum(seconds for name, seconds in prefill.items() if name in COMPUTE_TERMS) * 1e3
    tpot, ttft = rows["tpot_ms"]["measured"], rows["ttft_ms"]["measured"]
    found: dict[str, Any] = {"mbu": read / tpot if tpot else None, "mfu": work / ttft if ttft else None, "reason": None}
    broken = [name for name in ("mbu", "mfu") if (found[name] or 0) > 1]
    if broken:
        found["reason"] = (
            f"{' and '.join(broken)} above 1: faster than this hardware can read or compute this model, so the model, "
            "the precision, the hardware or the number of GPUs is not what was said (or drafts were accepted)"
        )
    return found
