"""`StepTime`: how long one engine step takes, in exact mode (B3). The scheduler, the simulator and the planner use it.

    bound     one roofline over the whole step: max(all FLOPs / pi, all bytes / beta)
    estimate  the sum over classes of work, each with its own max and its own measured efficiency

The classes are linear layers, experts, output head, decode attention and prefill attention, so a step that mixes a
prompt chunk with decodes is priced without a cliff. The input embedding is gathered: neither multiplied nor streamed;
a tied head is streamed once. Everything is per GPU. Plain floats only: `predict` runs in the scheduler's loop.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headway.core.errors import BadInput
from headway.core.step import StepShape, keys_read, pairs_computed
from headway.roofline.collectives import AllReduce, Fastest
from headway.roofline.hardware import Hardware
from headway.shape.model import ModelShape

ACTIVATION_BYTES = 2.0


class Efficiency(msgspec.Struct, frozen=True):
    """What measured kernels reach, and what a step costs besides: 1 and 0 everywhere is the bound.

    Attributes:
        stream, stream_experts, stream_cache: share of peak bandwidth reading weights, experts, KV cache (MBU).
        linear, experts, attention, prefill_attention: share of peak arithmetic (MFU).
        head_stream, head_linear: the shares in the output head, where it is held in another format; 0 = as the body's.
        ceiling: bytes/s at which kernels read weights at most, however fast memory is (so many reads can be in flight);
            0 = no such limit.
        overlap: how much of a class's smaller side hides behind its larger one: 1 = all (a roofline), 0 = they add up.
        step, layer, row, token: seconds added per step, per layer, per row of the batch, per new token.
        element: seconds added per new token, layer and unit of width: norms, rotation, rounding.
        logit: seconds added per logit row and vocabulary entry: drawing a token.
    """

    stream: float = 1.0
    stream_experts: float = 1.0
    stream_cache: float = 1.0
    linear: float = 1.0
    experts: float = 1.0
    attention: float = 1.0
    prefill_attention: float = 1.0
    head_stream: float = 0.0
    head_linear: float = 0.0
    ceiling: float = 0.0
    overlap: float = 1.0
    step: float = 0.0
    layer: float = 0.0
    row: float = 0.0
    token: float = 0.0
    element: float = 0.0
    logit: float = 0.0


class Layout(msgspec.Struct, frozen=True):
    """How one replica is spread over its GPUs.

    Attributes:
        gpus: GPUs of the replica; matrices and experts are split over all of them.
        attention_dp: groups of GPUs that each serve their own sequences with their own copy of the attention weights
            (data-parallel attention, for caches that tensor parallelism cannot split).
        imbalance: work of the GPU with the busiest experts over the mean (B8).
    """

    gpus: int = 1
    attention_dp: int = 1
    imbalance: float = 1.0


# Classes of work: the name of the term that reads, and of the one that multiplies.
TERMS = (
    ("weights", "arithmetic"), ("experts", "expert_arithmetic"), ("head", "head_arithmetic"), ("kv", "attention"),
    ("prefill_kv", "prefill_attention"),
)  # fmt: skip
MEMORY_TERMS = tuple(read for read, _ in TERMS)
COMPUTE_TERMS = tuple(work for _, work in TERMS)


class StepWork(msgspec.Struct, frozen=True):
    """What a step has to do, in amounts that no machine changes.

    Attributes:
        bytes, flops: read and multiplied by each class of work, in the order of `TERMS`.
        layers, rows, tokens, elements, logits: what overheads are counted by; see `Efficiency`.
    """

    bytes: tuple[float, ...]
    flops: tuple[float, ...]
    layers: int
    rows: int
    tokens: int
    elements: float
    logits: float

    def sides(self, pi: float, beta: float, e: Efficiency) -> tuple[tuple[float, float], ...]:
        """(seconds of reading, seconds of arithmetic) of each class, each at its own rate and alone."""
        stream, head = beta * e.stream, beta * (e.head_stream or e.stream)
        if e.ceiling:
            stream, head = both(stream, e.ceiling), both(head, e.ceiling)
        cache = beta * e.stream_cache
        rates = (stream, beta * e.stream_experts, head, cache, cache)
        shares = (e.linear, e.experts, e.head_linear or e.linear, e.attention, e.prefill_attention)
        return tuple(
            (read / rate, flops / (pi * share))
            for read, rate, flops, share in zip(self.bytes, rates, self.flops, shares, strict=True)
        )

    def overhead(self, e: Efficiency) -> float:
        """Seconds besides."""
        return (
            e.step + e.layer * self.layers + e.row * self.rows + e.token * self.tokens + e.element * self.elements
            + e.logit * self.logits
        )  # fmt: skip

    def seconds(self, pi: float, beta: float, e: Efficiency) -> float:
        """The estimate, communication apart."""
        return joined(self.sides(pi, beta, e), e.overlap) + self.overhead(e)


def both(rate: float, limit: float) -> float:
    """A rate that two things limit: nearly the lower one, 16 % below it where they are equal."""
    return (rate**-4 + limit**-4) ** -0.25


def joined(sides: Iterable[tuple[float, float]], overlap: float) -> float:
    """Seconds of all classes one after another: of each its larger side, and what is not hidden of the smaller."""
    return sum(max(side) + (1.0 - overlap) * min(side) for side in sides)


class StepCost(msgspec.Struct, frozen=True):
    """A predicted step.

    Attributes:
        seconds: the whole step.
        binds: "memory" or "compute", the larger side of the roofline.
        terms: seconds each part would take alone at its own rate. In the bound, memory and arithmetic terms overlap,
            so they do not add up to `seconds`; in the estimate each class counts its larger one.
    """

    seconds: float
    binds: str
    terms: dict[str, float]

    @property
    def largest(self) -> str:
        """Name of the largest term."""
        return max(self.terms, key=lambda name: self.terms[name])


def experts_touched(experts: int, active: int, tokens: float, skew: float = 0.0) -> float:
    """Experts of a layer that `tokens` tokens use: E * (1 - (1 - k/E)^B) for even routing (B8).

    `skew` s > 0: expert i is drawn with weight i^-s, so popular experts are shared and fewer are touched.
    """
    if tokens <= 0:
        return 0.0
    if skew == 0.0:
        return experts * (1.0 - (1.0 - active / experts) ** tokens)
    weights = [(rank + 1.0) ** -skew for rank in range(experts)]
    return sum(1.0 - (1.0 - share) ** tokens for share in _shares(weights, active))


def _shares(weights: list[float], active: int) -> Iterable[float]:
    """Probability that a token uses each expert: proportional to weight, at most 1, `active` in all."""
    sure = 0
    rest = sum(weights)
    while sure < active and weights[sure] * (active - sure) >= rest:  # sorted: the first ones saturate
        rest -= weights[sure]
        sure += 1
    return [1.0] * sure + [weight * (active - sure) / rest for weight in weights[sure:]]


class StepTime:
    """Seconds of a step of one model on one kind of replica.

    Args:
        shape: the model, with the precision its weights and cache have (`store_as`, `with_kv_bytes`).
        hardware: the device; its figures are per GPU.
        layout: GPUs of the replica.
        math: number format of the arithmetic; None = what the weights' format is multiplied in.
        efficiency: None for the bound, measured shares and overheads for an estimate.
        all_reduce: two per layer when there is more than one GPU (B7); None = communication is free.
        skew: unevenness of expert routing (B8).
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
    ) -> None:
        self.shape, self.hardware, self.layout = shape, hardware, layout or Layout()
        self.efficiency, self.all_reduce, self.skew = efficiency, all_reduce, skew
        self.math = math or hardware.math_for(shape.weight_format)
        self._pi, self._beta = peak_rate(hardware, self.math), hardware.bandwidth
        n, dp = self.layout.gpus, self.layout.attention_dp
        check_layout(shape, n, dp)
        params, stored = shape.params, shape.stored
        dense_flops = 2.0 * params.body  # per token (B3: 2 * N_body, the experts counted apart)
        self._linear_flops = dense_flops / n
        self._linear_bytes = (stored.body - stored.attention) / n + stored.attention / (n // dp)
        self._head_flops = 2.0 * shape.head_params / n
        self._head_bytes = (stored.embed if shape.tied else stored.head) / n
        self._expert_flops, self._expert_bytes = 0.0, 0.0
        if shape.moe:
            moe = shape.moe
            self._expert_flops = 2.0 * params.experts * moe.active / moe.experts / n * self.layout.imbalance
            self._expert_bytes = (
                stored.experts / moe.experts / n * self.layout.imbalance
            )  # per touched expert, all layers
        # Per group: bytes per cached position read, FLOPs per pair when decoding and when prefilling, states apart.
        self._cache = tuple(
            (
                group.reading_layers * group.layer_row_bytes(n // dp) / dp,
                group.reading_layers * group.decode_flops / n,
                group.reading_layers * group.prefill_flops / n,
                group.read_limit,
                group.kind == "state",
            )
            for group in shape.groups
        )

    def predict(self, step: StepShape) -> float:
        """Seconds of the step: the bound, or the estimate if there is an `efficiency`."""
        return self.seconds(self.work(step)) + self._communication(step.tokens) if step.tokens > 0 else 0.0

    def explain(self, step: StepShape) -> StepCost:
        """The step with its terms: what each part costs, and which side binds."""
        if step.tokens <= 0:
            return StepCost(0.0, "memory", {"overhead": 0.0})
        work = self.work(step)
        reduce = self._communication(step.tokens)
        sides = work.sides(self._pi, self._beta, self.efficiency or BOUND)
        memory = compute = 0.0
        terms: dict[str, float] = {}
        for (read_name, work_name), (read, arithmetic) in zip(TERMS, sides, strict=True):
            memory += read
            compute += arithmetic
            if read:
                terms[read_name] = read
            if arithmetic:
                terms[work_name] = arithmetic
        overhead = 0.0
        roof = max(memory, compute)
        if self.efficiency is not None:
            overhead = work.overhead(self.efficiency)
            roof = joined(sides, self.efficiency.overlap)
        terms |= {"all_reduce": reduce, "overhead": overhead}
        return StepCost(roof + reduce + overhead, "memory" if memory >= compute else "compute", terms)

    def seconds(self, work: StepWork) -> float:
        """Seconds of known work on one GPU."""
        if self.efficiency is not None:
            return work.seconds(self._pi, self._beta, self.efficiency)
        memory, compute = map(sum, zip(*work.sides(self._pi, self._beta, BOUND), strict=True))
        return max(memory, compute)

    def work(self, step: StepShape) -> StepWork:
        """What the step has to do on one GPU."""
        touched = self._touched(step.tokens)
        decode_bytes, decode_flops, chunk_bytes, chunk_flops = self._attention(step)
        head = 1.0 if step.logit_rows else 0.0
        return StepWork(
            (self._linear_bytes, self._expert_bytes * touched, self._head_bytes * head, decode_bytes, chunk_bytes),
            (self._linear_flops * step.tokens, self._expert_flops * step.tokens, self._head_flops * step.logit_rows,
             decode_flops, chunk_flops),
            self.shape.layers, step.rows, step.tokens, float(step.tokens) * self.shape.layers * self.shape.d_model,
            float(step.logit_rows) * self.shape.vocab,
        )  # fmt: skip

    def _touched(self, tokens: int) -> float:
        moe = self.shape.moe
        return experts_touched(moe.experts, moe.active, tokens, self.skew) if moe else 0.0

    def _attention(self, step: StepShape) -> tuple[float, float, float, float]:
        """(decode bytes, decode FLOPs, prefill bytes, prefill FLOPs) on one GPU."""
        decode_bytes = decode_flops = chunk_bytes = chunk_flops = 0.0
        decoding = bool(step.decode_kv_tokens)
        for index, (row_bytes, flops, chunk_pair_flops, limit, state) in enumerate(self._cache):
            if state:  # read and written once per row, whatever the context
                decode_bytes += 2.0 * row_bytes * step.rows
                decode_flops += flops * step.tokens
                continue
            read, pairs = step.kv_tokens[index], step.pairs[index]
            old_read = step.decode_kv_tokens[index] if decoding else 0
            old_pairs = step.decode_pairs[index] if decoding else 0
            new_read, new_pairs = read - old_read, pairs - old_pairs
            if limit is not None:  # sparse attention reads at most `limit` positions per query
                old_read, old_pairs = min(old_read, limit * step.rows), min(old_pairs, limit * step.rows)
                new_pairs = min(new_pairs, limit * step.tokens)
            decode_bytes += row_bytes * old_read
            decode_flops += flops * old_pairs
            chunk_bytes += row_bytes * new_read
            chunk_flops += chunk_pair_flops * new_pairs
        return decode_bytes, decode_flops, chunk_bytes, chunk_flops

    def _communication(self, tokens: int) -> float:
        if self.all_reduce is None or self.layout.gpus == 1:
            return 0.0
        message = tokens * self.shape.d_model * ACTIVATION_BYTES
        return 2.0 * self.shape.layers * self.all_reduce.seconds(message, self.layout.gpus)


BOUND = Efficiency()


def peak_rate(hardware: Hardware, math: str) -> float:
    """pi in FLOP/s; infinite where the catalogue has no figure, so that only the memory side is modelled."""
    if not hardware.peaks:
        return float("inf")
    peak = hardware.peak(math)
    if peak is None:
        known = ", ".join(hardware.peaks)
        raise BadInput("--math", f"{math!r} has no catalogued peak on {hardware.name}; accepted: {known}")
    return peak


def check_layout(shape: ModelShape, gpus: int, attention_dp: int = 1, field: str = "--gpus") -> None:
    """Refuse a tensor-parallel degree the model's heads or experts cannot be split into (B7)."""
    if gpus < 1:
        raise BadInput(field, f"{gpus}; accepted: a whole number from 1")
    if attention_dp < 1 or gpus % attention_dp:
        raise BadInput("--attention-dp", f"{attention_dp} does not divide {gpus} GPUs")
    tp = gpus // attention_dp
    if shape.heads % tp:
        accepted = [degree for degree in range(1, shape.heads + 1) if shape.heads % degree == 0]
        raise BadInput(field, f"{tp} does not divide the {shape.heads} attention heads; accepted: {_listed(accepted)}")
    if shape.kv_heads % tp and tp % shape.kv_heads:
        raise BadInput(field, f"{tp} neither divides nor is a multiple of the {shape.kv_heads} key/value heads")


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def decode_step(shape: ModelShape, batch: int, context: int) -> StepShape:
    """A step of `batch` decodes, each reading `context` cached tokens (its own new one included)."""
    reads = tuple(round(batch * group.kept(context)) for group in shape.groups)
    return StepShape(batch, batch, batch, reads, reads, reads, reads)


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
