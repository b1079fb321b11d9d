"""The latency-throughput frontier (B5): interactivity against throughput as the batch grows, and its landmarks."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headway.roofline.capacity import memory_batch
from headway.roofline.replica import Replica, decode, margins


class FrontierPoint(msgspec.Struct, frozen=True):
    """One batch size: its step, what each user and each GPU gets, and whether its caches fit."""

    batch: int
    seconds: float
    tokens_per_second_per_user: float
    tokens_per_second_per_gpu: float
    fits: bool
    binds: str


class Frontier(msgspec.Struct, frozen=True):
    """The curve and its landmarks.

    Attributes:
        knee: batch where arithmetic catches up with reading the weights, cache left out (B5).
        critical_context: T at which a sequence's cache takes as long to read as its arithmetic takes to do; beyond it
            no batch is compute-bound. None if the cache never catches up (or the peak is unknown).
        ceiling: tokens/s per GPU that no batch exceeds at this context: 1/t_K or 1/t_F, whichever is lower.
        fits: largest batch that fits in memory.
    """

    points: list[FrontierPoint]
    knee: float | None
    critical_context: float | None
    ceiling: float | None
    fits: int


def knee(d: Replica) -> float | None:
    """The batch where arithmetic catches up with reading the weights, caches left out: B* = s_W*I* N/(2*N_act) with
    every weight read, which is s_W*I*/2 for a dense model (B5)."""
    if d.pi == float("inf"):
        return None
    unit = d.amounts()
    read = unit.linear_read + unit.head_read + unit.expert_read * unit.experts
    return read / d.hardware.bandwidth * d.pi / (unit.linear_flops + unit.head_flops + unit.expert_flops)


def critical_context(d: Replica) -> float | None:
    """The T at which t_K = t_F (B5), by bisection: both are piecewise linear in T once windows are counted."""
    if d.pi == float("inf"):
        return None

    def excess(context: float) -> float:
        read, work = margins(d, context)
        return read - work

    low, high = 0.0, 1.0
    while excess(high) < 0:
        low, high = high, high * 2
        if high > 1e9:
            return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) >= 0 else (middle, high)
    return high


def ceiling(d: Replica, context: float) -> float | None:
    """Throughput no batch exceeds, tokens/s per GPU: 1/max(t_K, t_F) over n (B5). None where nothing bounds it."""
    longest = max(margins(d, context))
    return 1.0 / longest / d.gpus if longest else None


def default_batches(largest: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12 ... up to `largest`, which is included."""
    steps = {1, largest}
    power = 1
    while power <= largest:
        steps |= {size for size in (power, power * 3 // 2) if size <= largest}
        power *= 2
    return sorted(steps)


def frontier(d: Replica, context: float, batches: Iterable[int] | None = None, reserve: float = 0.0) -> Frontier:
    """The curve at one mean context. Batches default to a ladder that runs past what fits, so the dotted part shows."""
    fits = memory_batch(d, context, reserve)
    ladder = default_batches(max(256, min(4 * max(fits, 1), 65536)))
    corner = knee(d)
    marks = {max(1, min(round(mark), ladder[-1])) for mark in (fits, corner) if mark is not None}
    chosen = list(batches) if batches is not None else sorted({*ladder, *marks})
    points = []
    for batch in chosen:
        cost = decode(d, batch, context)
        points.append(
            FrontierPoint(
                batch, cost.seconds, 1.0 / cost.seconds, batch / cost.seconds / d.gpus, batch <= fits, cost.binds
            )
        )
    return Frontier(points, corner, critical_context(d), ceiling(d, context), fits)
