"""`StepTime`: how long one engine step takes (B3). The scheduler, the simulator and the planner use it, and only it.

    bound     one roofline over the whole step: max(all FLOPs / pi, all bytes / beta)
    estimate  the sum over classes of work, each with its own roofline and its own measured efficiency

The classes are linear layers, experts, output head, decode attention and prefill attention, so a step that mixes a
prompt chunk with decodes is priced without a cliff. Everything is per GPU. `predict` runs in the scheduler's loop:
plain floats. The closed loop of served requests evaluates the same code with arrays in their place (`loop.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import sqrt
from typing import Any

import msgspec
import numpy as np

from headway.core.errors import BadInput
from headway.core.receipts import StepParts
from headway.core.step import StepShape, keys_read, pairs_computed
from headway.roofline.collectives import AllReduce, Fastest
from headway.roofline.hardware import NETWORK, Hardware
from headway.roofline.work import (
    ACTIVATION_BYTES,
    COMPUTE_TERMS,
    TERMS,
    Amounts,
    Layout,
    StepWork,
    amounts_of,
    experts_touched,
)
from headway.shape.model import ModelShape

HAND_ON = 1e-5  # seconds until the first byte of a message between pipeline stages arrives
MOST_DEVICES = 1 << 16  # of one replica
RATES = ("stream", "stream_experts", "stream_cache", "linear", "experts", "attention", "prefill_attention",
         "head_stream", "head_linear", "ceiling")  # fmt: skip
COSTS = ("permute", "step", "layer", "row", "token", "element", "logit", "eager")


class Efficiency(msgspec.Struct, frozen=True):
    """What measured kernels reach, and what a step costs besides: the constants of an estimate.

    Attributes:
        stream, stream_experts, stream_cache: share of peak bandwidth reading weights, experts, KV cache (MBU).
        linear, experts, attention, prefill_attention: share of peak arithmetic (MFU).
        head_stream, head_linear: the shares in the output head, where it is held in another format; None = as the
            body's.
        ceiling: bytes/s at which kernels read weights at most, however fast memory is (so many reads can be in flight);
            None = no such limit.
        overlap: how much of a class's smaller side hides behind its larger one where both are equal: 1 = all (a
            roofline), 0 = they add up.
        spread: independent tokens that one more token counts as in the number of experts touched.
        tile: rows that a touched expert's matrices are padded by.
        permute: passes over the tokens' copies around routed experts.
        imbalance: work of the GPU with the busiest experts over the mean (B8).
        step, layer, row, token: seconds added per step, per layer, per row of the batch, per new token.
        element: seconds added per new token, layer and unit of width: norms, rotation, rounding.
        logit: seconds added per logit row and vocabulary entry: drawing a token.
        eager: seconds per layer to launch a step with prompt tokens kernel by kernel: what it takes at least.
    """

    stream: float = 1.0
    stream_experts: float = 1.0
    stream_cache: float = 1.0
    linear: float = 1.0
    experts: float = 1.0
    attention: float = 1.0
    prefill_attention: float = 1.0
    head_stream: float | None = None
    head_linear: float | None = None
    ceiling: float | None = None
    overlap: float = 1.0
    spread: float = 1.0
    tile: float = 0.0
    permute: float = 0.0
    imbalance: float = 1.0
    step: float = 0.0
    layer: float = 0.0
    row: float = 0.0
    token: float = 0.0
    element: float = 0.0
    logit: float = 0.0
    eager: float = 0.0

    def sides(self, work: StepWork, pi: float, beta: float) -> tuple[tuple[float, float], ...]:
        """(seconds of reading, seconds of arithmetic) of each class, each at its own rate and alone."""
        linear, experts, head, attention, chunk = work.flops
        weights, expert_read, head_read, cache, chunk_cache = work.bytes
        stream = beta * self.stream
        head_stream = stream if self.head_stream is None else beta * self.head_stream
        head_linear = self.linear if self.head_linear is None else self.head_linear
        if self.ceiling is not None:
            stream, head_stream = limited(stream, self.ceiling), limited(head_stream, self.ceiling)
        busiest = self.imbalance / beta, self.imbalance / pi
        padded = experts + self.tile * work.expert_row
        return (
            (weights / stream, linear / (pi * self.linear)),
            (expert_read * busiest[0] / self.stream_experts, padded * busiest[1] / self.experts),
            (head_read / head_stream, head / (pi * head_linear)),
            (cache / (beta * self.stream_cache), attention / (pi * self.attention)),
            (chunk_cache / (beta * self.stream_cache), chunk / (pi * self.prefill_attention)),
        )

    def slower(self, times: float) -> Efficiency:
        """That of steps which take so many times as long: rates fall, and what costs seconds rises."""
        rates = {name: value / times for name in RATES if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(self, **rates, **{name: getattr(self, name) * times for name in COSTS})

    @property
    def apart(self) -> float:
        """What `met` takes: 0 where all hides (a roofline), 4 where nothing does."""
        both = 2.0 * (1.0 - self.overlap)
        return both * both

    def meet(self, a: float, b: float) -> float:
        """Seconds of two things at once: nearly the longer one, and (2 - overlap) times it where they are equal."""
        return met(a, b, self.apart)

    def roof(self, sides: Iterable[tuple[float, float]]) -> float:
        """Seconds of all classes, one after another; a number that is 0 is of a class this step or model has not."""
        apart, seconds = self.apart, 0.0
        for read, work in sides:
            if read.__class__ is not float or read or work:
                seconds = seconds + met(read, work, apart)
        return seconds

    def overhead(self, work: StepWork, beta: float) -> float:
        """Seconds besides."""
        return (
            self.step + self.layer * work.layers + self.row * work.rows + self.token * work.tokens
            + self.element * work.elements + self.logit * work.logits + self.permute * work.routed / beta
        )  # fmt: skip

    def seconds(self, work: StepWork, pi: float, beta: float, communication: float = 0.0) -> float:
        """The step: its work at `pi` FLOP/s and `beta` bytes/s, and its communication."""
        busy = self.roof(self.sides(work, pi, beta)) + communication + self.overhead(work, beta)
        return self.meet(busy, self.eager * work.chunk_layers)


class Bound(Efficiency, frozen=True):
    """The constants of a bound: everything at its peak, and one roofline over the whole step. Shares below 1 (an MFU)
    and overheads of a user's own make it an assumption."""

    def roof(self, sides: Iterable[tuple[float, float]]) -> float:
        reading = working = 0.0
        for read, work in sides:  # in this order, of arrays too: `sum` of floats rounds otherwise
            reading, working = reading + read, working + work
        return self.meet(reading, working)


BOUND = Bound()


def met(a: float, b: float, apart: float) -> float:
    """Seconds of two things at once; `apart`: how little hides, from 0 to 4."""
    between = a - b
    square = between * between + apart * a * b
    return (a + b + (sqrt(square) if square.__class__ is float else np.sqrt(square))) / 2.0


def limited(rate: float, limit: float) -> float:
    """A rate that two things limit: nearly the lower one, 16 % below it where they are equal."""
    return (rate**-4 + limit**-4) ** -0.25


class StepCost(msgspec.Struct, frozen=True):
    """A predicted step.

    Attributes:
        seconds: the whole step.
        binds: "memory" or "compute", the larger side of the roofline.
        terms: seconds each part would take alone at its own rate. In the bound, memory and arithmetic terms overlap,
            so they do not add up to `seconds`; in the estimate each class counts little more than its larger one.
    """

    seconds: float
    binds: str
    terms: dict[str, float]

    @property
    def largest(self) -> str:
        """Name of the largest term."""
        return max(self.terms, key=lambda name: self.terms[name])

    def sum(self, *names: str) -> float:
        """Seconds of some terms together; those it does not have take none."""
        return sum(self.terms.get(name, 0.0) for name in names)

    @property
    def weights(self) -> float:
        """Seconds of reading every matrix."""
        return self.sum("weights", "experts", "head")

    @property
    def compute(self) -> float:
        """Seconds of all arithmetic."""
        return self.sum(*COMPUTE_TERMS)


class StepTime:
    """Seconds of a step of one model on one kind of replica.

    Args:
        shape: the model, with the precision its weights and cache have (`store_as`, `with_kv_bytes`).
        hardware: the device; its figures are per GPU.
        layout: GPUs of the replica.
        math: number format of the arithmetic; None = what the weights' format is multiplied in.
        efficiency: `BOUND`, or measured shares and overheads for an estimate; None = the bound.
        all_reduce: two per layer when there is more than one GPU (B7); None = communication is free.
        skew: unevenness of expert routing (B8).
        amounts: what its steps are made of, where that is not what `amounts_of(shape, layout)` says.
    """

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        layout: Layout | None = None,
        *,
        math: str | None = None,
        efficiency: Efficiency | None = None,
        all_reduce: AllReduce | Fastest | None = None,
        skew: float = 0.0,
        amounts: Amounts | None = None,
    ) -> None:
        self.shape, self.hardware, self.layout = shape, hardware, layout or Layout()
        check_layout(shape, self.layout)
        self.math = math or hardware.math_for(shape.weight_format)
        self.pi, self.beta = peak_rate(hardware, self.math), hardware.bandwidth
        self.gpus: float = self.layout.stage
        self.stages: float = self.layout.pipeline
        self.efficiency, self.all_reduce, self.skew = efficiency or BOUND, all_reduce, skew
        self.amounts = amounts or amounts_of(shape, self.layout)
        self.routes = bool(self.amounts.active)

    def predict(self, step: StepShape) -> float:
        """Seconds of the step: the bound, or the estimate if there is an `efficiency`."""
        if step.tokens <= 0:
            return 0.0
        return self.seconds(self.work(step), self.communication(step.tokens))

    def seconds(self, work: StepWork, communication: float = 0.0) -> float:
        """Seconds of known work on one GPU."""
        return self.efficiency.seconds(work, self.pi, self.beta, communication)

    def explain(self, step: StepShape) -> StepCost:
        """The step with its terms: what each part costs, and which side binds."""
        if step.tokens <= 0:
            return StepCost(0.0, "memory", {"overhead": 0.0})
        work, reduce = self.work(step), self.communication(step.tokens)
        sides = self.efficiency.sides(work, self.pi, self.beta)
        seconds = self.seconds(work, reduce)
        memory, compute = map(sum, zip(*sides, strict=True))
        terms = {
            name: value for names, pair in zip(TERMS, sides, strict=True)
            for name, value in zip(names, pair, strict=True) if value
        }  # fmt: skip
        terms |= {"all_reduce": reduce, "overhead": seconds - self.efficiency.roof(sides) - reduce}
        return StepCost(seconds, "memory" if memory >= compute else "compute", terms)

    def parts(self, step: StepShape) -> StepParts:
        """The step by what it grows with, for sharing it among its rows: a class of work counts what it takes, of which
        reading and arithmetic have a part each in proportion to what they would take alone."""
        work, unit, costs = self.work(step), self.amounts, self.efficiency
        classes = [
            (whole * read / (read + busy), whole * busy / (read + busy))
            if (whole := costs.meet(read, busy))
            else (0.0, 0.0)
            for read, busy in costs.sides(work, self.pi, self.beta)
        ]
        (weights, linear), (expert_read, experts), (head_read, head), decode, (chunk_read, chunk) = classes
        fixed, rows, drawn = costs.step + costs.layer * work.layers, costs.row * work.rows, costs.logit * work.logits
        rest = costs.overhead(work, self.beta) - fixed - rows - drawn
        old = step.decode_kv_tokens or (0,) * len(unit.caches)
        new = [keys - before for keys, before in zip(step.kv_tokens, old, strict=True)]
        pairs = [now - before for now, before in zip(step.pairs, step.decode_pairs or old, strict=True)]
        return StepParts(
            fixed=weights + expert_read + head_read + fixed,
            row=rows / max(1, step.rows),
            token=(linear + experts + self.communication(step.tokens) + rest) / max(1, step.tokens),
            logit=(head + drawn) / max(1, step.logit_rows),
            decode=_rates(sum(decode), [cache.read for cache in unit.caches], old),
            keys=_rates(chunk_read, [cache.chunk_read for cache in unit.caches], new),
            pairs=_rates(chunk, [cache.chunk_flops for cache in unit.caches], pairs),
        )

    def met(self, step: StepShape) -> dict[str, Any]:
        """Seconds of its parts, each the sum of a class's two sides as far as they do not hide behind each other; they
        add up to the whole."""
        work, e = self.work(step), self.efficiency
        reduce = self.communication(work.tokens)
        sides = [e.meet(*side) for side in e.sides(work, self.pi, self.beta)]
        named = {read: seconds for (read, _), seconds in zip(TERMS, sides, strict=True)}
        return {name: named[name] for name in ("weights", "experts", "head")} | {
            "kv": named["kv"] + named["prefill_kv"], "all_reduce": reduce,
            "overhead": self.seconds(work, reduce) - sum(sides) - reduce,
        }  # fmt: skip

    def work(self, step: StepShape) -> StepWork:
        """What the step has to do on one GPU."""
        unit, touched = self.amounts, step.experts
        if touched is None:
            touched = self.touched(step)
        return unit.work(step, touched)

    def touched(self, step: StepShape) -> float:
        """Experts of a layer that the step is expected to touch; 0 of a model without."""
        if not self.routes:
            return 0.0
        unit, skew = self.amounts, self.skew if step.skew is None else step.skew
        return experts_touched(unit.experts, unit.active, step.tokens, skew, self.efficiency.spread)

    def communication(self, tokens: float) -> float:
        """Seconds of the all-reduces of `tokens` new tokens: two per layer (B7), and of handing them on from stage to
        stage."""
        if self.all_reduce is None:
            return 0.0
        reduced = 2.0 * self.amounts.layers * self.all_reduce.seconds(tokens * self.amounts.message, self.gpus)
        sent = HAND_ON + tokens * self.amounts.width * ACTIVATION_BYTES / NETWORK
        return reduced + (self.stages - 1) * sent


def _rates(seconds: float, unit: Sequence[float], counts: Sequence[float]) -> tuple[float, ...]:
    """Seconds per count of each kind, where `counts` of them took `seconds` and one costs as much as `unit` says."""
    whole = sum(cost * count for cost, count in zip(unit, counts, strict=True))
    return tuple(seconds * cost / whole if whole else 0.0 for cost in unit)


def peak_rate(hardware: Hardware, math: str) -> float:
    """pi in FLOP/s; infinite where the catalogue has no figure, so that only the memory side is modelled."""
    if not hardware.peaks:
        return float("inf")
    peak = hardware.peak(math)
    if peak is None:
        known = ", ".join(hardware.peaks)
        raise BadInput("--math", f"{math!r} has no catalogued peak on {hardware.name}; accepted: {known}")
    return peak


def check_layout(shape: ModelShape, layout: Layout, field: str = "--gpus") -> None:
    """Refuse a layout that the model's layers, heads or experts cannot be split into (B7)."""
    gpus, stages, ranks, groups = layout.gpus, layout.pipeline, layout.attention_dp, layout.expert_parallel
    if not 1 <= gpus <= MOST_DEVICES:
        raise BadInput(field, f"{gpus} is not a whole number from 1 to {MOST_DEVICES}")
    if stages < 1 or gpus % stages or stages > shape.layers:
        accepted = [n for n in range(1, gpus + 1) if gpus % n == 0 and n <= shape.layers]
        raise BadInput("--pipeline", f"{stages} stages of {gpus} GPUs; accepted: {_listed(accepted)}")
    each = f"the {layout.stage} GPUs{' of a stage' if stages > 1 else ''}"
    dividing = [n for n in range(1, layout.stage + 1) if layout.stage % n == 0]
    if ranks < 1 or layout.stage % ranks:
        raise BadInput("--attention-dp", f"{ranks} does not divide {each}; accepted: {_listed(dividing)}")
    if groups < 1 or layout.stage % groups:
        raise BadInput("--expert-parallel", f"{groups} does not divide {each}; accepted: {_listed(dividing)}")
    if groups > (shape.moe.experts if shape.moe else 1):
        there = f"{shape.moe.experts} experts a layer" if shape.moe else "no experts"
        raise BadInput("--expert-parallel", f"{groups}: {shape.name} has {there}")
    tp = layout.tp
    if shape.heads % tp:
        accepted = [degree for degree in range(1, shape.heads + 1) if shape.heads % degree == 0]
        raise BadInput(field, f"{tp} does not divide the {shape.heads} attention heads; accepted: {_listed(accepted)}")
    if shape.kv_heads % tp and tp % shape.kv_heads:
        raise BadInput(field, f"{tp} neither divides nor is a multiple of the {shape.kv_heads} key/value heads")


def can_split(shape: ModelShape, gpus: int) -> bool:
    """Can tensor parallelism split this model over so many GPUs?"""
    return fits_layout(shape, Layout(gpus))


def fits_layout(shape: ModelShape, layout: Layout) -> bool:
    """Is this layout one of the model?"""
    try:
        check_layout(shape, layout)
    except BadInput:
        return False
    return True


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def decode_step(shape: ModelShape, batch: float, context: float) -> StepShape:
    """A step of `batch` decodes, each reading `context` cached tokens (its own new one included); means may be
    fractions."""
    reads: Any = tuple(batch * group.kept(context) for group in shape.groups)
    rows: Any = batch
    return StepShape(rows, rows, rows, reads, reads, reads, reads)


def prefill_step(shape: ModelShape, tokens: int, cached: int = 0, logits: int = 1, prompts: int = 1) -> StepShape:
    """A step that computes the next `tokens` of each of `prompts` prompts, of which `cached` are already computed."""
    reads = tuple(prompts * keys_read(cached, tokens, group.window) for group in shape.groups)
    pairs = tuple(prompts * pairs_computed(cached, tokens, group.window) for group in shape.groups)
    none = tuple(0 for _ in shape.groups)
    return StepShape(prompts * tokens, prompts, prompts * logits, reads, pairs, none, none)


def mixed_step(first: StepShape, second: StepShape) -> StepShape:
    """Both in one step: a prompt chunk beside running decodes."""

    def add(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(x + y for x, y in zip(a, b, strict=True))

    return StepShape(
        first.tokens + second.tokens, first.rows + second.rows, first.logit_rows + second.logit_rows,
        add(first.kv_tokens, second.kv_tokens), add(first.pairs, second.pairs),
        add(first.decode_kv_tokens, second.decode_kv_tokens), add(first.decode_pairs, second.decode_pairs),
        first.copies + second.copies,
    )  # fmt: skip
