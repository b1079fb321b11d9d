"""Measure this machine: how fast it reads memory, how fast it multiplies, and where the two branches meet.

The result is a `Profile`, a small JSON file that stands in for a catalogued device. Everything measured is the best of
several tries, because a roof is what the machine can do, not what it did while something else ran. This module may use
numpy; nothing in the hot path imports it.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway.core.errors import BadInput
from headway.roofline.profile import Profile

READ_BYTES = 256 << 20  # larger than any cache, so that reads reach memory
MATRIX = 2048
TRIES = 5


class KneePoint(msgspec.Struct, frozen=True):
    """One batch through one linear layer: seconds, and rows per second."""

    batch: int
    seconds: float
    rows_per_second: float


class Knee(msgspec.Struct, frozen=True):
    """A linear layer timed for growing batches.

    Attributes:
        width: of the square float32 weight.
        points: by batch.
        weight_seconds: time of the flat branch, streaming the weight. row_seconds: time each further row adds.
        batch: where the branches meet: weight_seconds / row_seconds.
    """

    width: int
    points: list[KneePoint]
    weight_seconds: float
    row_seconds: float
    batch: float


def measure(threads: int, memory: float, kernel_rates: Mapping[str, float] | None = None, created: str = "") -> Profile:
    """Measure this machine in a few seconds.

    Args:
        threads: cores this process may use.
        memory: bytes it may use.
        kernel_rates: measured FLOP/s of formats numpy cannot multiply fast (bf16, int8), by the kernels of the native
            backend; it lives on a higher floor, so the caller passes them in.
    """
    counts = sorted({1, threads} | {n for n in (2, 4, 8, 16, 32, 64) if n < threads})
    bandwidth = {str(count): read_bandwidth(count) for count in counts}
    rates = {"fp32": float32_rate()} | dict(kernel_rates or {})
    return Profile(platform.node() or "this machine", created or time.strftime("%Y-%m-%d"), threads, memory,
                   bandwidth, rates)  # fmt: skip


def read_bandwidth(threads: int, total: int = READ_BYTES) -> float:
    """Bytes/s read from memory by `threads` threads, each scanning its own part of one array."""
    array = np.ones(total // 4, dtype=np.float32)
    parts = np.array_split(array, threads)
    with ThreadPoolExecutor(threads) as pool:
        seconds = _best(lambda: list(pool.map(np.maximum.reduce, parts)))  # reduce releases the interpreter lock
    return array.nbytes / seconds


def float32_rate(size: int = MATRIX) -> float:
    """FLOP/s of a square float32 matrix product through numpy's BLAS, on the threads it is set to use."""
    left = np.ones((size, size), dtype=np.float32)
    return 2.0 * size**3 / _best(lambda: left @ left)


def measure_knee(width: int = 4096, batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)) -> Knee:
    """Time one `width` x `width` float32 linear layer (64 MB at 4096) for growing batches: the third text's
    experiment. Small batches take as long as streaming the weight, large ones as long as their arithmetic."""
    if width < 1:
        raise BadInput("--width", f"{width}; accepted: a whole number from 1")
    if not batches or min(batches) < 1:
        raise BadInput("--batches", "accepted: whole numbers from 1")
    weight = np.ones((width, width), dtype=np.float32)
    points = []
    for batch in sorted(set(batches)):
        rows = np.ones((batch, width), dtype=np.float32)
        seconds = _best(lambda rows=rows: rows @ weight, tries=3 if batch > 256 else TRIES)  # type: ignore[misc]
        points.append(KneePoint(batch, seconds, batch / seconds))
    flat = min(point.seconds for point in points)
    per_row = min(point.seconds / point.batch for point in points)
    return Knee(width, points, flat, per_row, flat / per_row)


def draw_knee(axes: Any, knee: Knee) -> None:
    """The two branches of a linear layer's time: measured points, and the roofs that enclose them."""
    batches = [point.batch for point in knee.points]
    axes.loglog(batches, [point.seconds * 1e3 for point in knee.points], "o-", label="measured")
    axes.loglog(batches, [knee.weight_seconds * 1e3] * len(batches), "--", label="streaming the weights")
    axes.loglog(batches, [knee.row_seconds * 1e3 * batch for batch in batches], "--", label="arithmetic")
    axes.axvline(knee.batch, color="grey", linewidth=0.8)
    title = f"One {knee.width} x {knee.width} linear layer: knee at {knee.batch:.0f}"
    axes.set(xlabel="batch", ylabel="ms", title=title)
    axes.legend(fontsize="small")


def _best(run: Callable[[], object], tries: int = TRIES) -> float:
    """Fewest seconds of `tries` runs, after one to warm up."""
    run()
    shortest = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        run()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile as JSON, replacing the file whole."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".part")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(profile)))
    partial.replace(target)
