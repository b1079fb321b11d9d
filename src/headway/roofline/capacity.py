"""How many sequences a replica serves at once (B6): what memory holds, what the promised speed allows."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headway.core.errors import BadInput
from headway.roofline.exact import step_time
from headway.roofline.memory import UNBOUNDED, MemoryPlan
from headway.roofline.step import COMPUTE_TERMS, MEMORY_TERMS, StepTime, decode_step
from headway.roofline.textbook import Replica, decode
from headway.shape.model import kv_bytes


class Capacity(msgspec.Struct, frozen=True):
    """The largest batch and its limits.

    Attributes:
        batch: the answer, 0 if not even one sequence is possible.
        limited_by: "memory", "tpot-memory", "tpot-compute", or "nothing fits" when the batch is 0.
        because: the smallest of the three limits, also when the batch is 0.
        memory_batch, tpot_memory_batch, tpot_compute_batch: each limit alone (None = no TPOT target).
        free_bytes: what is left for the cache.
        bytes_per_sequence: cache of one sequence at this context.
    """

    batch: int
    limited_by: str
    because: str
    memory_batch: int
    tpot_memory_batch: int | None
    tpot_compute_batch: int | None
    free_bytes: float
    bytes_per_sequence: float


def memory_plan(d: Replica, reserve: float = 0.0) -> MemoryPlan:
    """One GPU of a planned replica: C_HBM, M_W / n, and its part of `reserve` bytes for activations and whatever else
    the replica keeps (B6)."""
    weights = step_time(d).shape.stored.total if d.exact else d.weights
    return MemoryPlan(d.hardware.usable, weights / d.gpus, reserve=reserve / d.gpus)


def sequence_bytes(d: Replica, context: float) -> float:
    """Cache of one sequence on one GPU: of B1's bytes its share; in exact mode by heads, which may not split evenly."""
    return kv_bytes(d.shape, context, d.gpus) if d.exact else kv_bytes(d.shape, context) / d.gpus


def memory_batch(d: Replica, context: float, reserve: float = 0.0) -> int:
    """B_mem = floor((n*C_HBM - M_W - M_act) / (T*m_KV)), 0 if negative (B6); in exact mode per GPU."""
    return memory_plan(d, reserve).sequences(sequence_bytes(d, context))


def capacity(d: Replica, context: float, tpot: float | None = None, reserve: float = 0.0) -> Capacity:
    """The largest batch that fits in memory and keeps each step within `tpot` seconds, and what limits it (B6).

    Each line of the max bounds the batch separately: t_W(B) + B*t_K <= TPOT, and B*t_F <= TPOT.
    """
    if d.exact:
        return exact_capacity(step_time(d), round(context), tpot, reserve / d.gpus, d.overhead)
    _check_target(tpot)
    in_memory = memory_batch(d, context, reserve)
    by_read = by_work = None
    if tpot is not None:
        by_read = _within(d, context, tpot, ("weights", "kv"))
        by_work = _within(d, context, tpot, ("arithmetic", "attention"))
    limits: dict[str, int | None] = {"memory": in_memory, "tpot-memory": by_read, "tpot-compute": by_work}
    free, each = memory_plan(d, reserve).room * d.gpus, sequence_bytes(d, context) * d.gpus
    return Capacity(*_smallest(limits), in_memory, by_read, by_work, free, each)


def exact_capacity(
    model: StepTime, context: int, tpot: float | None, reserve: float = 0.0, overhead: float = 0.0
) -> Capacity:
    """The same in exact mode: memory per GPU, caches split by head; times of the model `model`. `reserve`: bytes per
    GPU kept for other things. `overhead`: seconds added to every step."""
    _check_target(tpot)
    shape, gpus = model.shape, model.layout.gpus
    plan = MemoryPlan(model.hardware.usable, shape.stored.total / gpus, reserve=reserve)
    each = kv_bytes(shape, context, gpus)
    in_memory = plan.sequences(each)

    def side(names: tuple[str, ...]) -> int | None:
        if tpot is None:
            return None
        allowed = tpot * (1 + 1e-12) - overhead

        def fits(batch: int) -> bool:
            terms = model.explain(decode_step(shape, batch, context)).terms
            return sum(terms.get(name, 0.0) for name in (*names, "all_reduce", "overhead")) <= allowed

        return _largest(fits)

    by_read, by_work = side(MEMORY_TERMS), side(COMPUTE_TERMS)
    limits: dict[str, int | None] = {"memory": in_memory, "tpot-memory": by_read, "tpot-compute": by_work}
    return Capacity(*_smallest(limits), in_memory, by_read, by_work, plan.room * gpus, each * gpus)


def _smallest(limits: dict[str, int | None]) -> tuple[int, str, str]:
    """(the smallest limit, what the answer is limited by, that limit's name)."""
    named = {name: value for name, value in limits.items() if value is not None}
    smallest = min(named, key=lambda name: named[name])
    batch = named[smallest]
    return batch, smallest if batch else "nothing fits", smallest


def _check_target(tpot: float | None) -> None:
    if tpot is not None and not tpot > 0:
        raise BadInput("--tpot-ms", f"{tpot * 1e3:g}; accepted: a number above 0")


def _within(d: Replica, context: float, tpot: float, side: tuple[str, str]) -> int:
    """Largest batch whose `side` of the roofline, with communication and overhead, stays within `tpot`."""

    def fits(batch: int) -> bool:
        terms = decode(d, batch, context).terms
        # a hair of tolerance, so that a target computed as exactly k steps admits k
        return sum(terms[name] for name in (*side, "all_reduce", "overhead")) <= tpot * (1 + 1e-12)

    return _largest(fits)


def _largest(fits: Callable[[int], bool]) -> int:
    """Largest batch that fits, given that every smaller one does."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high < UNBOUNDED and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
