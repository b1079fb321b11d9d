"""How many sequences a replica serves at once (B6): what memory holds, what the promised speed allows."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headway.core.errors import BadInput
from headway.roofline.memory import UNBOUNDED, MemoryPlan
from headway.roofline.replica import Replica
from headway.roofline.work import COMPUTE_TERMS, MEMORY_TERMS


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
    return MemoryPlan(d.hardware.usable, d.weights_per_gpu, reserve=reserve / d.gpus)


def memory_batch(d: Replica, context: float, reserve: float = 0.0) -> int:
    """B_mem = floor((n*C_HBM - M_W - M_act) / (T*m_KV)), 0 if negative (B6); as many again per attention group."""
    return memory_plan(d, reserve).sequences(d.sequence_bytes(context)) * d.attention_dp


def capacity(d: Replica, context: float, tpot: float | None = None, reserve: float = 0.0) -> Capacity:
    """The largest batch that fits in memory and keeps each step within `tpot` seconds, and what limits it (B6).

    Each line of the max bounds the batch separately: t_W(B) + B*t_K <= TPOT, and B*t_F <= TPOT.
    """
    if tpot is not None and not tpot > 0:
        raise BadInput("--tpot-ms", f"{tpot * 1e3:g}; accepted: a number above 0")
    in_memory, model = memory_batch(d, context, reserve), d.step_time()

    def within(side: tuple[str, ...]) -> int | None:
        """Largest batch whose `side` of the roofline, with communication and overhead, stays within `tpot`."""
        if tpot is None:
            return None
        allowed = tpot * (1 + 1e-12)  # a hair of tolerance: a target computed as exactly k steps admits k
        names = (*side, "all_reduce", "overhead")
        return _largest(lambda batch: model.explain(d.decodes(batch, context)).sum(*names) <= allowed)

    by_read, by_work = within(MEMORY_TERMS), within(COMPUTE_TERMS)
    limits: dict[str, int | None] = {"memory": in_memory, "tpot-memory": by_read, "tpot-compute": by_work}
    free, each = memory_plan(d, reserve).room * d.gpus, d.sequence_bytes(context) * d.gpus / d.attention_dp
    return Capacity(*_smallest(limits), in_memory, by_read, by_work, free, each)


def _smallest(limits: dict[str, int | None]) -> tuple[int, str, str]:
    """(the smallest limit, what the answer is limited by, that limit's name)."""
    named = {name: value for name, value in limits.items() if value is not None}
    smallest = min(named, key=lambda name: named[name])
    batch = named[smallest]
    return batch, smallest if batch else "nothing fits", smallest


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
