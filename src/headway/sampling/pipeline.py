"""From logits to a token. The order is fixed:

    penalties, bias, mask -> temperature -> softmax -> top-k -> top-p -> min-p -> renormalise -> draw

top-p and min-p measure mass relative to what the stage before kept. The draw is an exponential race over the tokens
that are left: token t finishes at E_t / p_t with E_t = -log(u_t) exponential, and the first one wins with probability
p_t. The u_t are keyed noise (see `noise`), so a row's token depends on nothing but its own logits and key.

Probabilities are kept relative to the likeliest token (weight 1), since neither ratios nor the race need a norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headway.core.request import SamplingParams
from headway.core.step import TokenLogprobs
from headway.sampling.logprobs import token_logprobs
from headway.sampling.noise import dense_uniforms, uniforms
from headway.sampling.rows import RowFailure, RowState
from headway.sampling.select import largest

_NUCLEUS_GUESS = 128  # tokens sorted at first to find a nucleus; times 8 while they do not hold enough mass


@dataclass(frozen=True)
class Survivors:
    """Tokens still in the race.

    Attributes:
        ids: int64 [n]; None means every token of the vocabulary, in order.
        weights: float32 [n], probability relative to the likeliest token.
    """

    ids: np.ndarray | None
    weights: np.ndarray

    def keep(self, which: np.ndarray) -> Survivors:
        """Only the entries `which` (indices or a mask)."""
        ids = np.arange(len(self.weights))[which] if self.ids is None else self.ids[which]
        return Survivors(ids, self.weights[which])


@dataclass
class Sampled:
    """What `sample` drew, one entry per row.

    Attributes:
        tokens: the drawn ids; -1 for a row that failed.
        logprobs: of the raw distribution, where the row asks for them.
        failed: row number to the sentence that says why.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)


def sample(logits: np.ndarray, rows: Sequence[RowState], positions: Sequence[int]) -> Sampled:
    """Draw one token per row, and count it in the row's state.

    Args:
        logits: float32 [rows, vocab], of the raw model; not written to.
        rows: the state of each row.
        positions: index within its sequence of the token each row draws.
    """
    result = Sampled()
    for index, (row, position) in enumerate(zip(rows, positions, strict=True)):
        token, report = -1, None
        try:
            token = draw(logits[index], row, position)
            if row.params.logprobs is not None:
                (report,) = token_logprobs(logits[index : index + 1], [token], row.params.logprobs)
            row.observe(token)
        except RowFailure as failure:
            token = -1
            result.failed[index] = str(failure)
        result.tokens.append(token)
        result.logprobs.append(report)
    return result


def draw(logits: np.ndarray, row: RowState, position: int) -> int:
    """The token of one row at one position. Does not change the row.

    Raises:
        RowFailure: the logits are not numbers, or no token is allowed.
    """
    adjusted = adjust(logits, row, position)
    likeliest = int(np.argmax(adjusted))  # the first NaN if there is one; else the lowest id among equals
    _check_peak(float(adjusted[likeliest]), position)
    if row.params.greedy:
        return likeliest
    return race(truncate(adjusted, row.params), row, position)


def _check_peak(peak: float, position: int) -> None:
    if peak == -np.inf:
        raise RowFailure(f"no token is allowed at position {position}: every logit is minus infinity")
    if not np.isfinite(peak):
        raise RowFailure(
            f"the model's logits at position {position} are not finite ({peak}); is the checkpoint damaged?"
        )


def adjust(logits: np.ndarray, row: RowState, position: int) -> np.ndarray:
    """Penalties, then bias, then the mask of min_tokens -> float32 [vocab]: `logits` itself if nothing applies."""
    hold = len(row.held_ids) and position - row.first < row.params.min_tokens
    if row.seen is None and row.output is None and not len(row.bias_ids) and not hold:
        return logits
    x = logits.copy()
    if row.seen is not None:  # CTRL's penalty (Keskar et al. 2019): towards lower probability on either side of zero
        seen, penalty = x[row.seen.ids], np.float32(row.params.repetition_penalty)
        x[row.seen.ids] = np.where(seen > 0, seen / penalty, seen * penalty)
    if row.output is not None:
        penalty_of = row.params.frequency_penalty * row.output.counts + row.params.presence_penalty
        x[row.output.ids] -= penalty_of.astype(np.float32)
    if len(row.bias_ids):
        x[row.bias_ids] += row.bias
    if hold:
        x[row.held_ids] = -np.inf
    return x


def truncate(adjusted: np.ndarray, params: SamplingParams) -> Survivors:
    """Temperature, softmax, top-k, top-p, min-p of adjusted logits with a finite maximum."""
    if 0 < params.top_k < len(adjusted):  # softmax keeps the order, so k are chosen first and the rest never computed
        ids = largest(adjusted, params.top_k)
        survivors = Survivors(ids, relative_weights(adjusted[ids], params.temperature))
    else:
        survivors = Survivors(None, relative_weights(adjusted, params.temperature))
    return keep_min_p(keep_top_p(survivors, params.top_p), params.min_p)


def relative_weights(logits: np.ndarray, temperature: float) -> np.ndarray:
    """softmax(logits / temperature) divided by its maximum -> float32, same shape."""
    # A temperature below float32's smallest gives the same weights as the smallest: 1 at the maximum, else 0.
    scale = np.float32(max(temperature, float(np.finfo(np.float32).tiny)))
    with np.errstate(over="ignore"):
        return np.exp((logits - logits.max()) / scale)


def keep_top_p(survivors: Survivors, top_p: float) -> Survivors:
    """The fewest likeliest tokens whose share of the survivors' mass reaches top_p."""
    if top_p >= 1.0:
        return survivors
    weights = survivors.weights
    total = weights.sum(dtype=np.float64)
    guess = _NUCLEUS_GUESS
    while True:
        order = largest(weights, guess)
        mass = np.cumsum(weights[order], dtype=np.float64) / total
        if mass[-1] >= top_p or len(order) == len(weights):
            return survivors.keep(order[: int(np.searchsorted(mass, top_p)) + 1])
        guess *= 8


def keep_min_p(survivors: Survivors, min_p: float) -> Survivors:
    """Tokens at least min_p times as likely as the likeliest, whose weight is 1."""
    return survivors if min_p == 0.0 else survivors.keep(survivors.weights >= np.float32(min_p))


def race(survivors: Survivors, row: RowState, position: int) -> int:
    """The survivor that finishes first."""
    ids, weights = survivors.ids, survivors.weights
    if ids is None:
        noise = dense_uniforms(len(weights), seed=row.seed, choice=row.choice, position=position)
    else:
        noise = uniforms(ids, seed=row.seed, choice=row.choice, position=position)
    with np.errstate(divide="ignore"):  # a weight of 0 never finishes
        winner = int(np.argmin(-np.log(noise) / weights))
    return winner if ids is None else int(ids[winner])
