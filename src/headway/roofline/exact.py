"""The exact mode of a planned replica: what `StepTime` says where the textbook has its formulas (B2-B5, B9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from headway.core.errors import BadInput
from headway.roofline.step import (
    COMPUTE_TERMS,
    MEMORY_TERMS,
    Layout,
    StepCost,
    StepTime,
    decode_step,
    prefill_step,
)
from headway.shape.model import store_as

if TYPE_CHECKING:
    from headway.roofline.textbook import Replica

MOST = 1 << 24  # batch beyond which no knee is looked for


def step_time(d: Replica) -> StepTime:
    """The replica's `StepTime`, the bound."""
    shape = d.shape if d.weights == d.shape.stored.total else store_as(d.shape, d.precision)
    peaks = {} if d.pi == float("inf") else {"bf16" if d.math == "fp16" else d.math: d.pi}
    device = msgspec.structs.replace(d.hardware, peaks=peaks)
    return StepTime(shape, device, Layout(d.gpus), math=d.math, all_reduce=d.all_reduce, skew=d.skew)


def decode(d: Replica, batch: float, context: float) -> StepCost:
    """One decode step; batch and context are rounded to what a step can have."""
    model = step_time(d)
    cost = model.explain(decode_step(model.shape, max(1, round(batch)), round(context)))
    return StepCost(
        cost.seconds + d.overhead, cost.binds, cost.terms | {"overhead": cost.terms["overhead"] + d.overhead}
    )


def prefill(d: Replica, tokens: float, mfu: float, cached: float) -> StepCost:
    """Prefill of one prompt in one step, its arithmetic at `mfu`."""
    model = step_time(d)
    found = model.explain(prefill_step(model.shape, round(tokens - cached), round(cached))).terms
    terms = {name: value / (mfu if name in COMPUTE_TERMS else 1.0) for name, value in found.items()}
    read, work = _side(terms, MEMORY_TERMS), _side(terms, COMPUTE_TERMS)
    seconds = max(read, work) + terms["all_reduce"] + terms["overhead"]
    return StepCost(seconds, "compute" if work >= read else "memory", terms)


def verification(d: Replica, batch: int, drafts: int, context: float) -> float:
    """Seconds of a step that checks `drafts` drafted tokens of each of `batch` sequences, and writes one more."""
    model, rows = step_time(d), drafts + 1
    return model.predict(prefill_step(model.shape, rows, round(context), logits=rows, prompts=batch)) + d.overhead


def margins(d: Replica, context: float) -> tuple[float, float]:
    """(t_K, t_F): seconds of reading and of arithmetic that one more sequence adds (B5)."""
    terms = decode(d, 1, context).terms
    return terms.get("kv", 0.0), _side(terms, COMPUTE_TERMS)


def knee(d: Replica) -> float | None:
    """The batch where arithmetic catches up with reading the weights, caches left out (B5)."""
    model = step_time(d)

    def bound_by_compute(batch: int) -> bool:
        terms = model.explain(decode_step(model.shape, batch, 0)).terms
        return _side(terms, COMPUTE_TERMS) >= _side(terms, MEMORY_TERMS)

    if not bound_by_compute(MOST):
        return None
    low, high = 0, MOST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bound_by_compute(middle) else (middle, high)
    return float(high)


def can_split(d: Replica, gpus: int) -> bool:
    """Whether exact mode has a layout of this model on so many GPUs."""
    try:
        step_time(msgspec.structs.replace(d, gpus=gpus))
    except BadInput:
        return False
    return True


def _side(terms: dict[str, float], names: tuple[str, ...]) -> float:
    return sum(terms.get(name, 0.0) for name in names)
