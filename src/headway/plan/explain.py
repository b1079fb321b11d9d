"""`headway plan explain`: where a step's time goes, what binds, what would help, and what would bind then."""

from __future__ import annotations

from typing import Any

import msgspec

from headway.plan.answers import Explained, Sensitivity
from headway.plan.setup import BOUNDS, Setup
from headway.plan.steps import frontier, step
from headway.roofline.capacity import Capacity, capacity
from headway.roofline.frontier import critical_context, knee
from headway.roofline.replica import Replica, rate, requantised
from headway.roofline.step import can_split
from headway.shape.formats import nominal_bytes


def explain(setup: Setup, batch: int | None = None, context: int = 4096, tpot_ms: float | None = None) -> Explained:
    """A waterfall of the step, its binding constraint, and the effect of one change at a time, each at the batch then
    possible. Without a batch: the largest possible."""
    setup = msgspec.structs.replace(setup, mode=setup.counting)
    replica = setup.replica(BOUNDS)
    tpot = None if tpot_ms is None else tpot_ms * 1e-3
    now = capacity(replica, max(1, context), tpot)
    chosen = batch if batch is not None else max(1, now.batch)
    one = step(setup, chosen, context)
    return Explained(
        **msgspec.structs.asdict(one), tpot_ms=tpot_ms, largest_share=one.terms[one.largest_term] / one.seconds,
        capacity=now.batch, limited_by=now.limited_by, knee=knee(replica), critical_context=critical_context(replica),
        next_limits=_next_limits(replica, now, chosen, context),
        sensitivities=[_sensitivity(name, replica, after, now, context, tpot) for name, after in _changes(replica)],
        frontier=frontier(setup, context),
    )  # fmt: skip


def _changes(replica: Replica) -> list[tuple[str, Replica]]:
    """One change at a time, each a replica of its own."""
    device = replica.hardware

    def on(**figures: Any) -> Replica:
        return msgspec.structs.replace(replica, hardware=msgspec.structs.replace(device, **figures))

    changes = []
    if replica.shape.kv_width > 1:
        changes.append(("8-bit KV cache", msgspec.structs.replace(replica, shape=replica.shape.with_kv_bytes(1.0))))
    for name, precision in (("8-bit weights", "fp8"), ("4-bit weights", "int4")):
        if nominal_bytes(precision) < 0.9 * replica.weight_width:
            changes.append((name, requantised(replica, precision)))
    changes += [
        ("memory bandwidth +10 %", on(bandwidth=device.bandwidth * 1.1)),
        ("memory size +10 %", on(memory=device.usable * 1.1, visible=None)),
        ("arithmetic +10 %", msgspec.structs.replace(replica, pi=replica.pi * 1.1)),
    ]
    if can_split(replica.shape, 2 * replica.gpus):
        changes.append(("twice the GPUs", msgspec.structs.replace(replica, gpus=2 * replica.gpus)))
    return changes


def _sensitivity(
    name: str, before: Replica, after: Replica, now: Capacity, context: int, tpot: float | None
) -> Sensitivity:
    """Effect at the largest batch each replica allows: what an operator would gain."""
    then = capacity(after, max(1, context), tpot)
    old, new = rate(before, now.batch, context), rate(after, then.batch, context)
    batch = then.batch / now.batch if now.batch else None
    return Sensitivity(name, new / old if old else None, new, batch, then.batch, then.limited_by)


def _next_limits(replica: Replica, now: Capacity, batch: int, context: int) -> list[str]:
    """What holds after the present limit, in words with figures."""
    limits = {"memory": now.memory_batch, "tpot-memory": now.tpot_memory_batch, "tpot-compute": now.tpot_compute_batch}
    known = sorted(((n, v) for n, v in limits.items() if v is not None), key=lambda item: item[1])
    lines = [f"{name} at batch {value}" for name, value in known if value > now.batch]
    critical, corner = critical_context(replica), knee(replica)
    if critical is not None and context < critical and corner is not None:
        lines.append(f"arithmetic past batch {corner:.0f} (the knee), for contexts below {critical:.0f} tokens")
    elif critical is not None:
        lines.append(
            f"no batch is compute-bound at this context (critical context {critical:.0f} tokens): "
            "fewer cache bytes raise the ceiling, more batch only creeps towards it"
        )
    if batch > now.memory_batch:
        lines.append(f"batch {batch} needs more memory than there is: {now.memory_batch} fit")
    return lines
