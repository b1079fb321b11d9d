"""Replicas under load: the speed and waiting their share of the traffic gets, and the most they can carry in time.

Speed is that of the closed loop which `estimate` prints and measured runs are scored with (`roofline/loop.py`), solved
for growing numbers of requests in flight. Traffic is open: requests arrive however long answers take, and Little's law
says how many are then in flight,

    rate = in flight / (TTFT + T_out * TPOT)

The number in flight at the target's percentile is taken as Poisson, the wait for a prompt's turn as a single-server
queue (Kingman): of these a closed loop has only means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, sqrt
from statistics import NormalDist

import msgspec
import numpy as np

from headway.plan.measured import loop_of
from headway.plan.traffic import Target, Traffic
from headway.roofline.calibrate import calibration
from headway.roofline.constants import resolve
from headway.roofline.deployment import Deployment
from headway.roofline.loop import Columns, Fleet, Loop
from headway.roofline.queueing import queue_quantile, queue_seconds
from headway.roofline.residual import corrections
from headway.roofline.served import METRICS, Corrected, at_loads
from headway.roofline.step import mixed_step
from headway.roofline.timing import Timing

CHUNKS = (8192, 4096, 2048, 1024, 512, 256)
MOST = 4096  # requests in flight on one replica, whatever its memory holds
LOADS = 40  # numbers in flight that the loop is solved for


class ReplicaLoad(msgspec.Struct, frozen=True):
    """A replica at some request rate.

    Attributes:
        tpot, ttft: seconds at the target's percentile. mean_tpot: mean. batch, peak_batch: decodes running.
        chunk: prompt tokens per step. prefill_share: prompts' part of the bill.
        broken: which limits are broken: "memory", "tpot", "ttft", "throughput"; empty = all is well.
    """

    tpot: float
    ttft: float
    mean_tpot: float
    batch: float
    peak_batch: float
    chunk: int
    prefill_share: float
    broken: tuple[str, ...] = ()


class Curve(msgspec.Struct, frozen=True):
    """A replica at every load, by chunk of prompts: columns over `flying`, requests in flight, of seconds per token and
    step, and requests/s.

    Attributes:
        deployment: what it is; its own concurrency says nothing.
        by_chunk: chunk -> `tpot`, `ttft`, `decode` (a step without prompts), `full` (one with a whole chunk), `own` (a
            prompt alone), `first` (TTFT but for waiting) and `rate`.
    """

    deployment: Deployment
    flying: np.ndarray
    by_chunk: dict[int, Columns]

    @property
    def lanes(self) -> int:
        """Micro-batches under way at once, each with its part of the requests in flight."""
        return self.deployment.pipeline

    def at(self, rate: float, traffic: Traffic, target: Target) -> ReplicaLoad:
        """The replica carrying `rate` requests per second, decodes and prompts both or decodes alone, as deployed."""
        chunk = next((chunk for chunk in self.by_chunk if self._in_time(chunk, rate, target)), min(self.by_chunk))
        columns, broken = self.by_chunk[chunk], []
        flying = self._flying(chunk, rate)
        peak = flying + NormalDist().inv_cdf(target.share) * sqrt(flying)

        def value(name: str, load: float) -> float:
            return float(np.interp(load, self.flying, columns[name]))

        mean, slow, decode, own = (
            value("tpot", flying), value("tpot", peak), value("decode", flying), float(columns["own"][0])
        )  # fmt: skip
        if max(peak, 1.0) > self.flying[-1]:
            broken.append("memory" if self.flying[-1] < MOST else "throughput")
        if target.tpot is not None and slow > target.tpot:
            broken.append("tpot")
        ttft = 0.0
        if not self.deployment.disaggregated:
            steps = traffic.fresh_tokens / chunk
            busy, turn = rate / self.lanes * (own + steps * decode), own + max(1.0, steps) * decode
            ttft = value("first", flying) + _wait(busy, turn, traffic, target)
            if target.ttft is not None and ttft > target.ttft:
                broken.append("ttft")
            if ttft == inf:
                broken.append("throughput")
        batch = max(1.0, rate * traffic.output_tokens * mean)
        decoding = traffic.output_tokens * decode / batch
        share = 0.0 if self.deployment.disaggregated else own / (own + self.lanes * decoding)
        highest = batch + NormalDist().inv_cdf(target.share) * sqrt(batch)
        return ReplicaLoad(slow, ttft, mean, batch, highest, chunk, share, tuple(broken))

    def prefilling(self, rate: float, traffic: Traffic, target: Target) -> ReplicaLoad:
        """The same machine as a worker of the prefill pool: one prompt after another."""
        columns, broken = self.by_chunk[CHUNKS[0]], []
        own, first = float(columns["own"][0]), float(columns["first"][0])
        ttft = first + _wait(rate * own, own, traffic, target)
        if ttft == inf:
            broken.append("throughput")
        if target.ttft is not None and ttft > target.ttft:
            broken.append("ttft")
        return ReplicaLoad(0.0, ttft, 0.0, 0.0, 0.0, CHUNKS[0], 1.0, tuple(broken))

    def response(self, rate: float, target: Target) -> float:
        """Mean seconds of a request at a rate, by Little's law; infinite at more than it can do."""
        chunk = next((chunk for chunk in self.by_chunk if self._in_time(chunk, rate, target)), min(self.by_chunk))
        return self._flying(chunk, rate) / rate

    def closed(self, flying: float) -> dict[str, float]:
        """Mean seconds of each metric with so many requests always in flight, prompts in the longest chunks."""
        columns = self.by_chunk[max(self.by_chunk)]
        held = min(flying, float(self.flying[-1]))
        found = {name: float(np.interp(held, self.flying, columns[name])) for name in METRICS}
        waiting = (flying - held) / held * (found["ttft"] + self.deployment.output * found["tpot"])
        return found | {"ttft": found["ttft"] + waiting}

    def _flying(self, chunk: int, rate: float) -> float:
        """Requests in flight at a rate; infinitely many where it is more than the replica can do."""
        rates = self.by_chunk[chunk]["rate"]
        return float(np.interp(rate, rates, self.flying, left=self.flying[0] * min(1.0, rate / rates[0]), right=inf))

    def _in_time(self, chunk: int, rate: float, target: Target) -> bool:
        """Do running streams stay within the TPOT target in a step that carries a whole chunk?"""
        if target.tpot is None or self.deployment.disaggregated:
            return True
        full = np.interp(self._flying(chunk, rate), self.flying, self.by_chunk[chunk]["full"])
        return bool(full <= target.tpot)


def _wait(busy: float, turn: float, traffic: Traffic, target: Target) -> float:
    """Seconds until a prompt's turn, at the target's percentile; infinite where there is more to do than time."""
    if busy >= 1:
        return inf
    return queue_quantile(busy, queue_seconds(busy, turn, traffic.arrival_cv2), target.share)


def curves(deployments: Sequence[Deployment], chunks: Sequence[int] = CHUNKS) -> list[Curve]:
    """Every deployment at every load, in one evaluation."""
    if not deployments:
        return []
    resolved, corrected = resolve(calibration().offsets, deployments), Corrected(deployments, corrections())
    each = len(chunks) * LOADS
    grid = [np.geomspace(1.0, max(2.0, min(d.capacity, MOST) / d.pipeline), LOADS) for d in deployments]  # of a lane
    rows = np.repeat(np.arange(len(deployments)), each)
    loads = np.concatenate([np.tile(loads, len(chunks)) for loads in grid])
    pieces = np.tile(np.repeat(np.array(chunks, float), LOADS), len(deployments))
    loop = Loop.calibrated(
        at_loads(Fleet.of(deployments), rows, loads, pieces), {name: column[rows] for name, column in resolved.items()}
    )
    at = np.repeat(np.arange(len(deployments)), LOADS)
    factors = {metric: np.exp(corrected.log(metric, at, np.concatenate(grid))) for metric in METRICS}
    everywhere = {
        metric: np.tile(one.reshape(-1, 1, LOADS), (1, len(chunks), 1)).ravel() for metric, one in factors.items()
    }
    solved = _columns(loop, everywhere)
    shaped = {name: column.reshape(len(deployments), len(chunks), LOADS) for name, column in solved.items()}
    return [
        Curve(deployment, grid[i] * deployment.pipeline, {
            chunk: {name: column[i, j] for name, column in shaped.items()} for j, chunk in enumerate(chunks)
        })
        for i, deployment in enumerate(deployments)
    ]  # fmt: skip


def measured_curve(timing: Timing, deployment: Deployment) -> Curve:
    """A replica of our own engine on a measured machine, whose chunks are as long as its step budget lets them be."""
    loop = loop_of(timing, deployment)
    grid = np.geomspace(1.0, max(2.0, loop.rows), LOADS)
    loads = [loop.at(float(flying)) for flying in grid]
    steps = np.array([max(1.0, loop.fresh / load.chunk) for load in loads])
    decode, mixed, tpot = (np.array([getattr(load, name) for load in loads]) for name in ("decode", "mixed", "tpot"))
    first = steps * mixed
    rate = np.maximum.accumulate(grid / (first + deployment.output * tpot))
    columns = {
        "tpot": tpot, "ttft": first, "decode": decode, "own": steps * (mixed - decode), "first": first, "rate": rate,
        "full": mixed,
    }  # fmt: skip
    return Curve(deployment, grid, {loads[-1].chunk: columns})


def _columns(loop: Loop, factors: Columns) -> Columns:
    """What a `Curve` holds of a solved loop, whose times of each metric measured runs correct by `factors`."""
    q, k = loop.q, loop.k
    solved = loop.tokens()
    decodes, chunk = loop.decoding(solved["batch"]), np.minimum(q["chunk"], q["fresh"])
    first = _never_falling(factors["ttft"] * (k["front"] + (1 + k["prompt_extra"]) * solved["own"] + solved["decode"]))
    slower = factors["tpot"]
    # Monotone but for rounding and corrections: more in flight do not go slower in all, nor faster each.
    tpot = _never_falling(slower * solved["tpot"])
    full = slower * loop.model.predict(mixed_step(decodes, loop.piece(chunk)))
    ttft = factors["ttft"] * loop.first_token(solved, k)
    return {
        "tpot": tpot, "ttft": ttft, "decode": slower * solved["decode"], "own": solved["own"], "first": first,
        "rate": _never_falling(q["stages"] * q["concurrency"] / (first + q["output"] * tpot)), "full": full,
    }  # fmt: skip


def _never_falling(column: np.ndarray) -> np.ndarray:
    """With load."""
    return np.maximum.accumulate(column.reshape(-1, LOADS), axis=1).ravel()


def most(at: Callable[[float], ReplicaLoad]) -> tuple[float, str]:
    """(highest rate in time and in memory, what breaks just above it). Rate 0: not even one request."""
    lowest = 1e-4
    if broken := at(lowest).broken:
        return 0.0, broken[0]
    high = 0.1
    while not at(high).broken and high < 1e6:
        high *= 2
    low = high / 2 if high > 0.1 else lowest
    for _ in range(18):
        middle = (low + high) / 2
        low, high = (low, middle) if at(middle).broken else (middle, high)
    return low, (at(high).broken or ("throughput",))[0]
