"""From logits to a token. The order is fixed:

    penalties, bias, mask -> temperature -> softmax -> top-k -> top-p -> min-p -> renormalise -> draw

top-p and min-p measure mass relative to what the stage before kept. The draw is an exponential race over the tokens
that are left: token t finishes at E_t / p_t with E_t = -log(u_t) exponential, and the first one wins with probability
p_t. The u_t are keyed noise (see `noise`), so a row's token depends on nothing but its own logits and key. Among equals
(logits for greedy and top-k, probabilities for top-p, finishing times for the draw) the lowest id comes first.

Probabilities are kept relative to the likeliest token (weight 1), since neither ratios nor the race need a norm. Every
number is made by IEEE arithmetic in a defined order (see `arithmetic`): this file is the specification, which looks at
all of a row, of the backends' `draw`, which look at what matters and give the same token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.core.request import SamplingParams
from headway.sampling.adjust import adjust
from headway.sampling.arithmetic import exponential, logarithm, masses
from headway.sampling.logits import Logits
from headway.sampling.noise import dense_uniforms, uniforms
from headway.sampling.rows import RowFailure, RowState
from headway.sampling.select import largest
from headway.sampling.table import NOT_FINITE, NOTHING_ALLOWED, SMALLEST_TEMPERATURE, Draws, failure

_NUCLEUS_GUESS = 128  # tokens sorted at first to find a nucleus; times 8 while they do not hold enough mass


@dataclass(frozen=True)
class Survivors:
    """Tokens still in the race.

    Attributes:
        ids: int64 [n], ascending; None means every token of the vocabulary.
        weights: float32 [n], probability relative to the likeliest token.
    """

    ids: np.ndarray | None
    weights: np.ndarray

    def keep(self, which: np.ndarray) -> Survivors:
        """Only the entries `which` (indices or a mask)."""
        ids = np.arange(len(self.weights))[which] if self.ids is None else self.ids[which]
        return Survivors(ids, self.weights[which])


def draw_rows(logits: Logits, draws: Draws) -> np.ndarray:
    """The specification of `Backend.draw`: one token per draw -> int32 [draws].

    Where there is none, the entry is `NOT_FINITE` or `NOTHING_ALLOWED`.
    """
    tokens = np.empty(len(draws), np.int32)
    for index, (slot, row, position) in enumerate(zip(draws.slots, draws.rows, draws.positions, strict=True)):
        params = draws.table.params[slot]
        assert params is not None, f"slot {slot} is free"
        adjusted = logits.rows[row]
        peak = NOT_FINITE if np.isnan(logits.logsumexp[row]) else likeliest(adjusted)
        if peak < 0 or params.greedy:
            tokens[index] = peak
        else:
            tokens[index] = race(truncate(adjusted, params), params, int(draws.table.choice[slot]), int(position))
    return tokens


def draw(logits: np.ndarray, row: RowState, position: int) -> int:
    """The token of one row at one position. Does not change the row.

    Raises:
        RowFailure: the logits are not numbers, or no token is allowed.
    """
    adjusted = adjust(logits, row, position)
    token = likeliest(adjusted)
    if token < 0:
        raise RowFailure(failure(token, position))
    return token if row.params.greedy else race(truncate(adjusted, row.params), row.params, row.choice, position)


def distribution(logits: np.ndarray, row: RowState, position: int) -> np.ndarray:
    """What `draw` draws from -> float64 [vocab], sum 1. Does not change the row.

    Raises:
        RowFailure: as `draw`.
    """
    adjusted = adjust(logits, row, position)
    token = likeliest(adjusted)
    if token < 0:
        raise RowFailure(failure(token, position))
    p = np.zeros(len(logits))
    if row.params.greedy:
        p[token] = 1.0
        return p
    survivors = truncate(adjusted, row.params)
    p[slice(None) if survivors.ids is None else survivors.ids] = survivors.weights
    return p / p.sum()


def likeliest(adjusted: np.ndarray) -> int:
    """The largest logit's id, the lowest among equals; or `NOT_FINITE`, or `NOTHING_ALLOWED`."""
    token = int(np.argmax(adjusted))  # the first NaN if there is one
    peak = adjusted[token]
    if peak == -np.inf:
        return NOTHING_ALLOWED
    return token if np.isfinite(peak) else NOT_FINITE


def truncate(adjusted: np.ndarray, params: SamplingParams) -> Survivors:
    """Temperature, softmax, top-k, top-p, min-p of adjusted logits with a finite maximum."""
    if 0 < params.top_k < len(adjusted):  # softmax keeps the order, so k are chosen first and the rest never computed
        ids = np.sort(largest(adjusted, params.top_k))
        survivors = Survivors(ids, relative_weights(adjusted[ids], params.temperature))
    else:
        survivors = Survivors(None, relative_weights(adjusted, params.temperature))
    return keep_min_p(keep_top_p(survivors, params.top_p), params.min_p)


def relative_weights(logits: np.ndarray, temperature: float) -> np.ndarray:
    """softmax(logits / temperature) divided by its maximum -> float32, same shape."""
    with np.errstate(over="ignore"):
        inverse_temperature = np.float32(1) / np.float32(max(temperature, SMALLEST_TEMPERATURE))
        return exponential((logits - logits.max()) * inverse_temperature)


def keep_top_p(survivors: Survivors, top_p: float) -> Survivors:
    """The fewest likeliest tokens whose share of the survivors' mass reaches top_p."""
    if top_p >= 1.0:
        return survivors
    weights = survivors.weights
    wanted = top_p * float(masses(weights).sum())
    guess = _NUCLEUS_GUESS
    while True:
        order = largest(weights, guess)
        mass = np.cumsum(masses(weights[order])).astype(np.float64)
        if mass[-1] >= wanted or len(order) == len(weights):
            return survivors.keep(np.sort(order[: int(np.searchsorted(mass, wanted)) + 1]))
        guess *= 8


def keep_min_p(survivors: Survivors, min_p: float) -> Survivors:
    """Tokens at least min_p times as likely as the likeliest, whose weight is 1."""
    return survivors if min_p == 0.0 else survivors.keep(survivors.weights >= np.float32(min_p))


def race(survivors: Survivors, params: SamplingParams, choice: int, position: int) -> int:
    """The survivor that finishes first."""
    assert params.seed is not None, "it is set when a request is admitted"
    ids, weights = survivors.ids, survivors.weights
    if ids is None:
        noise = dense_uniforms(len(weights), seed=params.seed, choice=choice, position=position)
    else:
        noise = uniforms(ids, seed=params.seed, choice=choice, position=position)
    with np.errstate(divide="ignore"):  # a weight of 0 never finishes
        winner = int(np.argmin(-logarithm(noise) / weights))
    return winner if ids is None else int(ids[winner])
