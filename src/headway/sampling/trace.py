"""The distribution of one position before and after every stage of the pipeline, for people who want to look."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.core.request import SamplingParams
from headway.core.step import RowInit
from headway.sampling.adjust import adjust
from headway.sampling.noise import dense_uniforms
from headway.sampling.pipeline import Survivors, draw, keep_min_p, keep_top_p, relative_weights
from headway.sampling.rows import RowState
from headway.sampling.select import largest


@dataclass(frozen=True)
class Stage:
    """The distribution after one stage.

    Attributes:
        name: "model", "penalties", "temperature", "top_k", "top_p" or "min_p".
        active: whether the parameters make this stage do anything.
        probabilities: float64 [vocab], sum 1; 0 for a token that is out.
        survivors: how many tokens are in.
    """

    name: str
    active: bool
    probabilities: np.ndarray
    survivors: int


@dataclass(frozen=True)
class Trace:
    """All stages in order, and the draw.

    Attributes:
        stages: the raw model's distribution first, the one drawn from last.
        uniforms: float64 [vocab], the keyed noise u of each token; it finishes at -log(u) / p.
        token: the token drawn.
    """

    stages: tuple[Stage, ...]
    uniforms: np.ndarray
    token: int


def trace(logits: np.ndarray, row: RowState, position: int) -> Trace:
    """Run the pipeline's own stages one by one for one position.

    Args:
        logits: float32 [vocab], of the raw model.
        row: the sampler's row as it was before this position; see `row_before`.
        position: index within the sequence of the token to draw.

    Raises:
        RowFailure: as `draw`.
    """
    params, vocab = row.params, len(logits)
    token = draw(logits, row, position)
    adjusted = adjust(logits, row, position)
    k = params.top_k if 0 < params.top_k < vocab else vocab
    if params.greedy:  # the limit of a falling temperature, with the tie gone to the lowest id
        tempered = top_k = Survivors(np.array([token]), np.ones(1, np.float32))
    else:
        tempered = Survivors(np.arange(vocab), relative_weights(adjusted, params.temperature))
        top_k = tempered.keep(np.sort(largest(adjusted, k)))
    top_p = keep_top_p(top_k, params.top_p)
    min_p = keep_min_p(top_p, params.min_p)
    stages = (
        _stage("model", True, vocab, Survivors(None, relative_weights(logits, 1.0))),
        _stage("penalties", adjusted is not logits, vocab, Survivors(None, relative_weights(adjusted, 1.0))),
        _stage("temperature", params.temperature != 1.0, vocab, tempered),
        _stage("top_k", k < vocab, vocab, top_k),
        _stage("top_p", params.top_p < 1.0, vocab, top_p),
        _stage("min_p", params.min_p > 0.0, vocab, min_p),
    )
    return Trace(stages, dense_uniforms(vocab, seed=row.seed, choice=row.choice, position=position), token)


def row_before(tokens: tuple[int, ...], prompt_len: int, params: SamplingParams, choice: int = 0) -> RowState:
    """A sampler row that has seen `tokens`, to trace the position after them. The seed must be set."""
    return RowState(RowInit("trace", tokens, prompt_len, params, choice))


def _stage(name: str, active: bool, vocab: int, survivors: Survivors) -> Stage:
    probabilities = np.zeros(vocab)
    ids = slice(None) if survivors.ids is None else survivors.ids
    probabilities[ids] = survivors.weights / survivors.weights.sum(dtype=np.float64)
    return Stage(name, active, probabilities, int(np.count_nonzero(probabilities)))
