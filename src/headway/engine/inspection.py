"""A model at work on one prompt, with everything in sight: tokens, embedding rows, what every head attends to, how the
cache grows, and each position's distribution through every stage of sampling.

It runs on the reference backend, whose numbers are the specification: the family's own forward pass, over operations
that also write down what is asked for. One row, one step for the prompt and one for each further token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from headway.core.errors import BadInput
from headway.core.request import SamplingParams
from headway.model.load import OpenModel
from headway.ops.paged import attention_weights
from headway.ops.protocol import CacheLayout, StepBatch
from headway.ops.reference import ReferenceBackend, ReferenceOps
from headway.sampling.select import largest
from headway.sampling.trace import Trace, row_before, trace
from headway.shape.model import kv_bytes

BLOCK = 32  # tokens
MOST_TOKENS = 512  # of prompt and answer


@dataclass(frozen=True)
class Growth:
    """The cache after a step.

    Attributes:
        computed: tokens that the step computed.
        cached: tokens in the cache.
        blocks: that hold them, over all KV groups.
        bytes: of their keys and values, without the unused ends of blocks.
    """

    computed: int
    cached: int
    blocks: int
    bytes: int


@dataclass(frozen=True)
class StageSeen:
    """The next token's distribution after one stage of sampling.

    Attributes:
        name, active, survivors: as in `sampling.trace.Stage`.
        top: the likeliest tokens, (id, probability).
    """

    name: str
    active: bool
    survivors: int
    top: tuple[tuple[int, float], ...]


@dataclass
class Inspection:
    """What was seen.

    Attributes:
        tokens: ids of prompt and answer.
        prompt_len: how many of them are the prompt.
        embedding: float32 [d] per computed token, as the first layer gets it.
        stages: per computed position, the next token's distribution through every stage.
        drawn: per computed position, the token that was drawn there; those behind the prompt are the answer.
        last_logits: float32 [vocab], of the raw model, behind the last computed token.
        watched: the position whose attention was written down.
        attention: per layer, float32 [heads, watched + 1].
        growth: after each step.
    """

    tokens: list[int]
    prompt_len: int
    watched: int
    embedding: list[np.ndarray] = field(default_factory=list)
    stages: list[tuple[StageSeen, ...]] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    last_logits: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    attention: dict[int, np.ndarray] = field(default_factory=dict)
    growth: list[Growth] = field(default_factory=list)


class _WatchedOps(ReferenceOps):
    """The reference's operations, written down."""

    def __init__(self, backend: ReferenceBackend, batch: StepBatch, seen: Inspection) -> None:
        super().__init__(backend.caches, batch)
        self._seen = seen

    def embed(self, table: np.ndarray, scale: float = 1.0, positions: np.ndarray | None = None) -> np.ndarray:
        x = super().embed(table, scale, positions)
        self._seen.embedding += list(x.copy())
        return x

    def attention(
        self, q: np.ndarray, layer: int, scale: float, softcap: float = 0.0, sinks: np.ndarray | None = None
    ) -> np.ndarray:
        batch, watched, cache = self._batch, self._seen.watched, self._caches[layer]
        (at,) = np.nonzero(batch.positions == watched)
        if len(at):
            query = (q[at[0]] * np.float32(scale)).reshape(-1, cache.keys.shape[3])
            group = batch.groups[cache.group]
            self._seen.attention[layer] = attention_weights(query, watched, cache, group, 0, softcap, sinks)
        return super().attention(q, layer, scale, softcap, sinks)


def inspect(
    opened: OpenModel,
    prompt: Sequence[int],
    params: SamplingParams,
    eos_ids: Sequence[int],
    position: int | None = None,
    top: int = 8,
) -> Inspection:
    """Run a prompt and up to `params.max_tokens` further tokens.

    Args:
        prompt: token ids.
        params: how further tokens are drawn; a seed must be set.
        position: whose attention to write down; negative counts from the prompt's end; None = the prompt's last token.
        top: how many of the likeliest tokens to keep of each distribution.

    Raises:
        BadInput: prompt and answer are too long, or there is no such position.
        HeadwayError: the model cannot be loaded.
    """
    most = len(prompt) + (params.max_tokens or 0)
    if not prompt or most > min(MOST_TOKENS, opened.info.context_length):
        limit = min(MOST_TOKENS, opened.info.context_length)
        more = most - len(prompt)
        raise BadInput("--prompt", f"{len(prompt)} tokens and {more} to come; from 1 to {limit} are shown")
    watched = len(prompt) - 1 if position is None else position + (len(prompt) if position < 0 else 0)
    computed = max(len(prompt), most - 1)  # the last token that is drawn is not
    if not 0 <= watched < computed:
        raise BadInput("--position", f"{position} is none of the {computed} positions that are computed")
    seen = Inspection(list(prompt), len(prompt), watched)
    backend = ReferenceBackend()
    model = opened.prepare(backend)
    groups = model.shape.groups
    blocks = -(-most // BLOCK)
    backend.allocate(CacheLayout(groups, (blocks,) * len(groups), BLOCK))
    try:
        for batch in _steps(seen, params, blocks, len(groups), eos_ids):
            rows = np.asarray(model.forward(_WatchedOps(backend, batch, seen)))
            seen.last_logits = rows[-1]
            cached = int(batch.kv_len[0])
            held = sum(-(-cached // BLOCK) for _ in groups)
            seen.growth.append(Growth(len(batch.ids), cached, held, int(kv_bytes(model.shape, cached))))
            for offset, logits in enumerate(rows):
                end = cached - len(rows) + offset + 1
                row = row_before(tuple(seen.tokens[:end]), min(end, len(prompt)), params)
                found = trace(logits, row, end)
                seen.stages.append(_summary(found, top))
                seen.drawn.append(found.token)
    finally:
        backend.close()
    if not seen.attention:
        raise BadInput("--position", f"{position}: the answer has ended before it")
    return seen


def _steps(
    seen: Inspection, params: SamplingParams, blocks: int, groups: int, eos_ids: Sequence[int]
) -> Iterator[StepBatch]:
    """The prompt, then token after token, as they are drawn."""
    start = 0
    while True:
        yield StepBatch.alone(seen.tokens[start:], start, blocks, groups)
        start = len(seen.tokens)
        if not params.max_tokens:
            return
        seen.tokens.append(seen.drawn[-1])
        if start + 1 - seen.prompt_len >= params.max_tokens or seen.drawn[-1] in eos_ids:
            return


def _summary(found: Trace, top: int) -> tuple[StageSeen, ...]:
    stages = []
    for stage in found.stages:
        ids = largest(stage.probabilities, min(top, len(stage.probabilities)))
        listed = tuple((int(id), float(stage.probabilities[id])) for id in ids if stage.probabilities[id] > 0)
        stages.append(StageSeen(stage.name, stage.active, stage.survivors, listed))
    return tuple(stages)
