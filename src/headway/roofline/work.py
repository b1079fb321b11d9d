"""What a step has to do on one GPU of a replica, in amounts that no machine changes: bytes, FLOPs and counts (B2-B4).

    StepShape --Amounts.work--> StepWork --Efficiency.seconds--> seconds

`Amounts` are those of one token, one row, one touched expert, one read of the weights. Everything here is arithmetic
without branches on values, so that arrays (one entry per replica) may stand wherever a float does.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headway.core.step import StepShape
from headway.shape.model import ModelShape

ACTIVATION_BYTES = 2.0

# Classes of work: the name of the term that reads, and of the one that multiplies.
TERMS = (
    ("weights", "arithmetic"), ("experts", "expert_arithmetic"), ("head", "head_arithmetic"), ("kv", "attention"),
    ("prefill_kv", "prefill_attention"),
)  # fmt: skip
MEMORY_TERMS = tuple(read for read, _ in TERMS)
COMPUTE_TERMS = tuple(work for _, work in TERMS)


class StepWork(msgspec.Struct, frozen=True):
    """One step on one GPU.

    Attributes:
        bytes, flops: read and multiplied by each class of work, in the order of `TERMS`.
        layers: of the model. chunk_layers: the same if the step has prompt tokens, else 0.
        rows: of the GPU's own sequences. tokens: new ones of the whole replica.
        elements: tokens * layers * width. logits: logit rows * vocabulary.
        expert_row: FLOPs of one more row in every touched expert.
        routed: bytes of the tokens' copies around the routed experts, passed once.
    """

    bytes: tuple[float, ...]
    flops: tuple[float, ...]
    layers: float
    chunk_layers: float
    rows: float
    tokens: float
    elements: float
    logits: float
    expert_row: float
    routed: float


class Cache(msgspec.Struct, frozen=True):
    """One KV group as attention meets it on one GPU; all zeros for a state, which has no positions.

    Attributes:
        read, flops: bytes per cached position of one sequence and FLOPs per query-key pair, of decodes.
        chunk_read, chunk_flops: the same of prompt chunks, sequences spread evenly over data-parallel attention.
        limit: positions a query reads at most; None = all that are kept.
    """

    read: float = 0.0
    flops: float = 0.0
    chunk_read: float = 0.0
    chunk_flops: float = 0.0
    limit: int | None = None


class Layout(msgspec.Struct, frozen=True):
    """How one replica is spread over its GPUs.

    Attributes:
        gpus: GPUs of the replica; matrices and experts are split over all of them.
        attention_dp: groups of GPUs that each serve their own sequences with their own copy of all but the routed
            experts (data-parallel attention, for caches that tensor parallelism cannot split).
        expert_parallel: groups of GPUs that each hold their own experts, rather than a slice of every expert.
        pipeline: stages that the layers are dealt to, each with so many of the GPUs. As many micro-batches are under
            way, so that a step is one of them passing through all layers, on one stage's GPUs at a time; the other two
            are of a stage.
    """

    gpus: int = 1
    attention_dp: int = 1
    expert_parallel: int = 1
    pipeline: int = 1

    @property
    def stage(self) -> int:
        """GPUs of one pipeline stage, over which each matrix is split."""
        return max(1, self.gpus // self.pipeline)

    @property
    def tp(self) -> int:
        """GPUs that share one sequence."""
        return max(1, self.stage // self.attention_dp)


class Amounts(msgspec.Struct, frozen=True):
    """What a replica's steps are made of, on one GPU.

    Attributes:
        linear_read, head_read, expert_read: bytes of the matrices every token passes, of the output head, and of one
            touched expert in every layer that has experts.
        linear_flops, expert_flops: per token. head_flops: per logit row.
        experts, active: E and k of each mixture layer; 1 and 0 without one.
        expert_row: FLOPs of one row in one expert of every layer. routed: bytes of one token's copies.
        state_read, state_flops: of a row with one new token; chunk_state_flops: per prompt token.
        caches: by KV group.
        ranks: data-parallel groups the rows are dealt to.
        message: bytes of one token in one all-reduce. layers, width, vocab: L, d, V.
    """

    linear_read: float
    linear_flops: float
    head_read: float
    head_flops: float
    expert_read: float
    expert_flops: float
    experts: float
    active: float
    expert_row: float
    routed: float
    state_read: float
    state_flops: float
    chunk_state_flops: float
    caches: tuple[Cache, ...]
    ranks: float
    message: float
    layers: float
    width: float
    vocab: float

    def work(self, step: StepShape, touched: float) -> StepWork:
        """What a step has to do that touches `touched` experts of each layer."""
        tokens, logit_rows, caches, none = step.tokens, step.logit_rows, self.caches, (0,) * len(self.caches)
        rows = larger(step.rows / self.ranks, 1.0)  # of the rank with most
        share = rows / larger(step.rows, 1.0)
        prompts = chunk_read = 0.0
        read, flops = self.state_read * rows, self.state_flops * step.rows
        chunk_flops = self.chunk_state_flops * (tokens - step.rows)
        old = step.decode_kv_tokens or none, step.decode_pairs or none
        for cache, keys, pairs, old_keys, old_pairs in zip(caches, step.kv_tokens, step.pairs, *old, strict=True):
            new_keys, new_pairs = keys - old_keys, pairs - old_pairs
            if cache.limit is not None:  # sparse attention reads at most `limit` positions per query
                old_keys, old_pairs = min(old_keys, cache.limit * step.rows), min(old_pairs, cache.limit * step.rows)
                new_pairs = min(new_pairs, cache.limit * tokens)
            prompts += new_keys
            read += cache.read * share * old_keys
            flops += cache.flops * share * old_pairs
            chunk_read += cache.chunk_read * new_keys
            chunk_flops += cache.chunk_flops * new_pairs
        return StepWork(
            (self.linear_read, self.expert_read * touched, self.head_read * (logit_rows > 0), read, chunk_read),
            (self.linear_flops * tokens, self.expert_flops * tokens, self.head_flops * logit_rows, flops, chunk_flops),
            self.layers, self.layers * (prompts > 0), rows, tokens, tokens * self.layers * self.width,
            logit_rows * self.vocab, self.expert_row * touched, self.routed * tokens,
        )  # fmt: skip


def amounts_of(shape: ModelShape, layout: Layout) -> Amounts:
    """The amounts of a model spread over a replica's GPUs. The input embedding is gathered: neither multiplied nor
    streamed; a tied head is streamed once. Latent caches are not split by head (B7)."""
    n, tp, dp = layout.stage, layout.tp, layout.attention_dp
    params, stored, moe = shape.params, shape.stored, shape.moe
    dealt = n if dp > 1 or layout.expert_parallel > 1 else 1  # GPUs that each route their own tokens only
    states = [group for group in shape.groups if group.kind == "state"]
    return Amounts(
        linear_read=stored.body / tp, linear_flops=2.0 * params.body / n,
        head_read=(stored.embed if shape.tied else stored.head) / tp, head_flops=2.0 * shape.head_params / n,
        expert_read=stored.experts / moe.experts / n if moe else 0.0, expert_flops=2.0 * shape.n_routed / n,
        experts=moe.experts if moe else 1, active=moe.active if moe else 0,
        expert_row=2.0 * params.experts / moe.experts / n if moe else 0.0,
        routed=moe.layers * moe.active * shape.d_model * ACTIVATION_BYTES / dealt if moe else 0.0,
        state_read=sum(2.0 * g.reading_layers * g.layer_row_bytes(tp) for g in states),  # read and written
        state_flops=sum(g.reading_layers * g.decode_flops for g in states) / n,
        chunk_state_flops=sum(g.reading_layers * g.prefill_flops for g in states) / n,
        caches=tuple(
            Cache() if group.kind == "state" else Cache(
                group.reading_layers * group.layer_row_bytes(tp), group.reading_layers * group.decode_flops / tp,
                group.reading_layers * group.layer_row_bytes(tp) / dp, group.reading_layers * group.prefill_flops / n,
                group.read_limit,
            )
            for group in shape.groups
        ),
        ranks=dp, message=message_bytes(shape, 2.0 / n if dp > 1 else 1.0),
        layers=shape.layers, width=shape.d_model, vocab=shape.vocab,
    )  # fmt: skip


def message_bytes(shape: ModelShape, tokens: float) -> float:
    """What one all-reduce of a step adds up: the residual of every token in 16 bits (B7)."""
    return tokens * shape.d_model * ACTIVATION_BYTES


def larger(a: float, b: float) -> float:
    """max(a, b), of floats and of arrays."""
    return (a + b + abs(a - b)) / 2.0


def experts_touched(experts: float, active: float, tokens: float, skew: float = 0.0, spread: float = 1.0) -> float:
    """Experts of a layer that `tokens` tokens use: E * (1 - (1 - k/E)^B) for even routing (B8).

    `skew` s > 0: expert i is drawn with weight i^-s, so popular experts are shared and fewer are touched.
    `spread` < 1: every token after the first counts as so much of an independent one, because neighbours choose alike.
    """
    independent = 1.0 + (tokens - 1.0) * spread
    if skew == 0.0:
        return experts * (1.0 - (1.0 - active / experts) ** independent) * (tokens > 0)
    weights = [(rank + 1.0) ** -skew for rank in range(int(experts))]
    return sum(1.0 - (1.0 - share) ** independent for share in _shares(weights, int(active))) * (tokens > 0)


def _shares(weights: list[float], active: int) -> Iterable[float]:
    """Probability that a token uses each expert: proportional to weight, at most 1, `active` in all."""
    sure = 0
    rest = sum(weights)
    while sure < active and weights[sure] * (active - sure) >= rest:  # sorted: the first ones saturate
        rest -= weights[sure]
        sure += 1
    return [1.0] * sure + [weight * (active - sure) / rest for weight in weights[sure:]]
