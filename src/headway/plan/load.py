"""One replica under load: the speed and waiting its share of the traffic gets, and the most it can carry in time.

A mixed replica runs chunked prefill beside decodes. In a steady state one equation holds: during a step of t seconds,
r*t requests arrive per replica, so a step carries r*T_in*t prompt tokens and, by Little's law, r*T_out*t decodes:

    t = step time of (r*T_out*t decodes, r*T_in*t prompt tokens)

The smallest t that satisfies it is the mean step, hence TPOT; if there is none the replica is saturated. Tails: the
number decoding is taken as Poisson, waiting for prefill as a single-server queue (Kingman).
"""

from __future__ import annotations

from functools import cached_property
from math import ceil, sqrt
from statistics import NormalDist

import msgspec

from headway.plan.traffic import Target, Traffic
from headway.roofline.memory import MemoryPlan, replica_memory
from headway.roofline.queueing import queue_quantile, queue_seconds
from headway.roofline.step import StepTime, decode_step, mixed_step, prefill_step
from headway.shape.model import kv_bytes

CHUNKS = (8192, 4096, 2048, 1024, 512, 256)
SATURATED = 60.0  # seconds: a step longer than this is not served


class Load(msgspec.Struct, frozen=True):
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


class OpenLoop:
    """One replica whose requests arrive at a rate of their own, however long answers take.

    Args:
        model: estimates its steps. role: "mixed", "prefill" or "decode".
    """

    def __init__(self, model: StepTime, role: str = "mixed") -> None:
        self.model, self.role = model, role

    @cached_property
    def memory(self) -> MemoryPlan:
        """Of one GPU."""
        layout = self.model.layout
        return replica_memory(self.model.shape, self.model.hardware, layout.gpus, layout.attention_dp, CHUNKS[0])

    def sequence_bytes(self, tokens: float) -> float:
        """Cache of one sequence on one GPU; data-parallel attention keeps whole sequences on few GPUs."""
        layout = self.model.layout
        return kv_bytes(self.model.shape, tokens, layout.gpus // layout.attention_dp) / layout.attention_dp

    def at(self, rate: float, traffic: Traffic, target: Target) -> Load:
        """The replica carrying `rate` requests per second of this traffic."""
        if self.role == "prefill":
            return self._prefill_only(rate, traffic, target)
        z = NormalDist().inv_cdf(target.share)
        fresh = traffic.fresh_tokens if self.role == "mixed" else 0.0
        step = self._steady_step(rate, traffic, fresh)
        if step is None:
            return Load(SATURATED, SATURATED, SATURATED, 0, 0, CHUNKS[-1], 0, ("throughput",))
        batch = max(1.0, rate * traffic.output_tokens * step)
        peak = batch + z * sqrt(batch)
        prompt_tokens = rate * fresh * step
        slow = self._seconds(peak, prompt_tokens, traffic)
        chunk, ttft = CHUNKS[0], 0.0
        if self.role == "mixed":
            chunk = self._chunk(batch, traffic, target)
            ttft = self._first_token(rate, batch, chunk, traffic, target)
        held = peak * self.sequence_bytes(traffic.mean_context)
        broken = [
            name
            for name, bad in (
                ("memory", held > self.memory.room),
                ("tpot", target.tpot is not None and slow > target.tpot),
                ("ttft", target.ttft is not None and ttft > target.ttft),
            )
            if bad
        ]
        if ttft == float("inf"):
            broken.append("throughput")
        share = self._prefill_share(batch, fresh, traffic)
        return Load(slow, ttft, step, batch, peak, chunk, share, tuple(broken))

    def most(self, traffic: Traffic, target: Target) -> tuple[float, str]:
        """(highest rate in time and in memory, what breaks just above it). Rate 0: not even one request."""
        lowest = 1e-4
        first = self.at(lowest, traffic, target)
        if first.broken:
            return 0.0, first.broken[0]
        high = 0.1
        while not self.at(high, traffic, target).broken and high < 1e6:
            high *= 2
        low = high / 2 if high > 0.1 else lowest
        for _ in range(18):
            middle = (low + high) / 2
            low, high = (low, middle) if self.at(middle, traffic, target).broken else (middle, high)
        return low, (self.at(high, traffic, target).broken or ("throughput",))[0]

    def _seconds(self, batch: float, prompt_tokens: float, traffic: Traffic) -> float:
        """A step of `batch` decodes beside `prompt_tokens` of prompts, which on average are half done."""
        shape = self.model.shape
        step = decode_step(shape, max(1, round(batch)), round(traffic.mean_context))
        if prompt_tokens >= 1:
            before = round(traffic.input_tokens * (traffic.cache_hit + (1 - traffic.cache_hit) / 2))
            step = mixed_step(step, prefill_step(shape, round(prompt_tokens), before, logits=1))
        return self.model.predict(step)

    def _prefill_share(self, batch: float, fresh: float, traffic: Traffic) -> float:
        """Prompts' part of the bill: time prompts would take alone over that of prompts and decodes alone. In mixed
        steps they share the weights' read, and neither owns it."""
        if fresh <= 0:
            return 0.0
        size = min(fresh, CHUNKS[2])
        alone = self.model.predict(prefill_step(self.model.shape, round(size))) * fresh / size
        decodes = traffic.output_tokens / batch * self._seconds(batch, 0.0, traffic)
        return alone / (alone + decodes)

    def _steady_step(self, rate: float, traffic: Traffic, fresh: float) -> float | None:
        """Smallest t with t = seconds(r*T_out*t, r*fresh*t), by bisection; None = saturated."""

        def excess(t: float) -> float:
            return self._seconds(rate * traffic.output_tokens * t, rate * fresh * t, traffic) - t

        low, high = 0.0, self._seconds(1, 0, traffic)
        while excess(high) > 0:
            low, high = high, high * 2
            if high > SATURATED:
                return None
        for _ in range(14):
            middle = (low + high) / 2
            low, high = (middle, high) if excess(middle) > 0 else (low, middle)
        return high

    def _chunk(self, batch: float, traffic: Traffic, target: Target) -> int:
        """Largest chunk whose step keeps running streams within the TPOT target (the engine's millisecond budget)."""
        if target.tpot is None:
            return CHUNKS[0]
        for chunk in CHUNKS:
            if self._seconds(batch, chunk, traffic) <= target.tpot:
                return chunk
        return CHUNKS[-1]

    def _first_token(self, rate: float, batch: float, chunk: int, traffic: Traffic, target: Target) -> float:
        """TTFT at the target's percentile: half a step until the next plan, queueing for prefill, own chunks."""
        fresh = traffic.fresh_tokens
        step = self._seconds(batch, min(chunk, fresh), traffic)
        service = ceil(fresh / chunk) * step
        busy = rate * fresh / chunk * self._seconds(batch, chunk, traffic)  # full chunks, shared by short prompts
        if busy >= 1:
            return float("inf")
        wait = queue_seconds(busy, service, traffic.arrival_cv2)
        return step / 2 + queue_quantile(busy, wait, target.share) + service

    def _prefill_only(self, rate: float, traffic: Traffic, target: Target) -> Load:
        """A prefill worker of a split deployment: one prompt after another."""
        fresh, cached = round(traffic.fresh_tokens), round(traffic.input_tokens * traffic.cache_hit)
        service = self.model.predict(prefill_step(self.model.shape, fresh, cached))
        busy = rate * service
        broken = []
        if self.sequence_bytes(traffic.input_tokens) > self.memory.room:
            broken.append("memory")
        if busy >= 1:
            return Load(0, float("inf"), 0, 0, 0, fresh, 1, (*broken, "throughput"))
        wait = queue_seconds(busy, service, traffic.arrival_cv2)
        ttft = queue_quantile(busy, wait, target.share) + service
        if target.ttft is not None and ttft > target.ttft:
            broken.append("ttft")
        return Load(0.0, ttft, 0.0, 0.0, 0.0, fresh, 1.0, tuple(broken))
