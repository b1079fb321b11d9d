"""The step-time model's word beside each measured number (SPEC C5), and how much of the machine was used (C2).

The prediction is a *bound*: peak rates, no queue, no interference, no host. What a measurement has beyond it is named
`unexplained`, not explained away; for the time to first token it holds the queue. The batch and the context that the
bound is taken at are the measured ones, so a disagreement is one about the step, not about the traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.bench.load import Run
from headway.bench.records import TOKEN_KINDS, RequestRecord
from headway.core.errors import BadInput
from headway.core.step import StepShape
from headway.roofline.collectives import all_reduce_of
from headway.roofline.hardware import Hardware
from headway.roofline.shape import ModelShape, nominal_bytes, store_as
from headway.roofline.step import Layout, StepTime, decode_step, prefill_step

MEMORY_TERMS = ("weights", "experts", "head", "kv", "prefill_kv")  # seconds = bytes / beta
HOP_SECONDS = 2e-6  # of an all-reduce over a scale-up link, where there is one


@dataclass(frozen=True)
class Machine:
    """What is behind the endpoint, as its user says."""

    shape: ModelShape
    hardware: Hardware
    gpus: int = 1

    @classmethod
    def of(cls, shape: ModelShape, hardware: Hardware, gpus: int, precision: str | None, kv: str | None) -> Machine:
        """With the precision of weights and cache named; None = as the checkpoint stores them, 16 bits."""
        if precision is not None:
            shape = store_as(shape, precision)
        if kv is not None:
            shape = shape.with_kv_bytes(nominal_bytes(kv, "--kv-precision"))
        return cls(shape, hardware, gpus)

    def model(self) -> StepTime:
        link = self.hardware.link
        if self.gpus > 1 and link is None:
            raise BadInput("--gpus", f"{self.hardware.name} has no link between devices in the catalogue; accepted: 1")
        reduce = all_reduce_of("ring", link.bandwidth, HOP_SECONDS) if self.gpus > 1 and link is not None else None
        return StepTime(self.shape, self.hardware, Layout(self.gpus), all_reduce=reduce)


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


def predict(run: Run, summary: dict[str, Any], machine: Machine) -> dict[str, Any]:
    """The `prediction` object: per metric measured median, predicted bound, their ratio, the rest, and the terms."""
    done = [r for r in run.records if r.completed and not r.warmup and r.usage_trusted and r.prompt_tokens]
    if not done:
        return {"reason": "no request was completed with usage, so batch and context are not known"}
    model = machine.model()
    prompt = float(np.mean([r.prompt_tokens or 0 for r in done]))
    cached = float(np.mean([r.cached_tokens or 0 for r in done]))
    output = float(np.mean([r.output_tokens or 0 for r in done]))
    batch, context = mean_batch(done), prompt + output / 2
    # A step has a whole number of rows: the bound between two of them is interpolated.
    low = int(batch)
    steps = [model.explain(decode_step(machine.shape, rows, round(context))) for rows in (low, low + 1)]
    share = batch - low
    decode = steps[0].seconds * (1 - share) + steps[1].seconds * share
    fresh = max(1, round(prompt - cached))
    prefill_shape: StepShape = prefill_step(machine.shape, fresh, round(cached))
    prefill = model.explain(prefill_shape)
    rows = {
        "ttft_ms": _row(summary["ttft_ms"]["p50"], prefill.seconds, prefill.terms),
        "tpot_ms": _row(summary["tpot_ms"]["p50"], decode, steps[0].terms),
        "itl_token_ms": _row(summary["itl_token_ms"]["p50"], decode, steps[0].terms),
        "e2e_ms": _row(summary["e2e_ms"]["p50"], prefill.seconds + (output - 1) * decode, {}),
    }
    return {
        "label": "bound: peak rates, no queue, no interference, no host time",
        "model": machine.shape.name,
        "hardware": machine.hardware.name,
        "gpus": machine.gpus,
        "batch": batch,
        "context": context,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "binds": {"decode": steps[0].binds, "prefill": prefill.binds},
        "metrics": rows,
        "output_tokens_per_second": {"measured": summary["throughput"]["output"], "at_this_batch": batch / decode},
        **_utilisation(rows, steps[0].terms, prefill.terms),
    }


def _row(measured: float | None, predicted: float, terms: dict[str, float]) -> dict[str, Any]:
    bound = predicted * 1e3
    return {
        "measured": measured,
        "predicted": bound,
        "measured_over_predicted": measured / bound if measured is not None and bound else None,
        "unexplained": measured - bound if measured is not None else None,
        "terms": {name: seconds * 1e3 for name, seconds in terms.items() if seconds},
    }


def _utilisation(rows: dict[str, Any], decode: dict[str, float], prefill: dict[str, float]) -> dict[str, Any]:
    """MBU of decode (bytes of a step / TPOT / beta) and MFU of prefill (FLOPs / TTFT / pi; a queue lowers it)."""
    read = sum(seconds for name, seconds in decode.items() if name in MEMORY_TERMS) * 1e3
    work = sum(seconds for name, seconds in prefill.items() if name.endswith(("arithmetic", "attention"))) * 1e3
    tpot, ttft = rows["tpot_ms"]["measured"], rows["ttft_ms"]["measured"]
    found: dict[str, Any] = {"mbu": read / tpot if tpot else None, "mfu": work / ttft if ttft else None, "reason": None}
    broken = [name for name in ("mbu", "mfu") if (found[name] or 0) > 1]
    if broken:
        found["reason"] = (
            f"{' and '.join(broken)} above 1: faster than this hardware can read or compute this model, so the model, "
            "the precision, the hardware or the number of GPUs is not what was said (or drafts were accepted)"
        )
    return found
