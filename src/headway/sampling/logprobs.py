"""Log probabilities and ranks of the raw model distribution: before penalties, temperature and every other stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.core.step import TokenLogprobs
from headway.sampling.rows import RowFailure
from headway.sampling.select import largest

_SLICE = 16  # rows at once: the temporaries stay at 16 rows of the vocabulary, however long the prompt


def token_logprobs(logits: np.ndarray, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """What the model thought of `tokens`, and of the likeliest alternatives, at each row.

    For generated tokens the row is the one they were drawn from; for prompt tokens it is the one of the position
    before them.

    Args:
        logits: float32 [rows, vocab], raw.
        tokens: one id per row.
        top: how many of the likeliest tokens to list.

    Returns:
        One entry per row. Rank 1 is the likeliest, equal ones by lowest id, so a token of rank r <= top is entry
        r - 1 of the list.

    Raises:
        RowFailure: a row holds a NaN or +inf, or nothing but -inf.
    """
    if len(logits) != len(tokens):
        raise ValueError(f"{len(logits)} rows of logits for {len(tokens)} tokens")
    reports: list[TokenLogprobs] = []
    for start in range(0, len(tokens), _SLICE):
        part = logits[start : start + _SLICE]
        norms = log_norms(part)
        for row, norm, token in zip(part, norms.tolist(), tokens[start : start + _SLICE], strict=True):
            reports.append(_report(row, norm, token, top))
    return reports


def log_norms(logits: np.ndarray) -> np.ndarray:
    """log(sum(exp(logits))) of each row, summed in float64 -> float64 [rows]."""
    peaks = logits.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):  # infinite peaks give NaN, caught below
        norms = peaks[:, 0] + np.log(np.exp(logits - peaks).sum(axis=1, dtype=np.float64))
    if not np.isfinite(norms).all():
        raise RowFailure(
            "the model's logits are not finite, so they have no log probabilities; is the checkpoint damaged?"
        )
    return norms


def _report(row: np.ndarray, norm: float, token: int, top: int) -> TokenLogprobs:
    chosen = row[token]
    rank = 1 + int(np.count_nonzero(row > chosen)) + int(np.count_nonzero(row[:token] == chosen))
    likeliest = largest(row, top)
    pairs = zip(likeliest.tolist(), (row[likeliest] - norm).tolist(), strict=True)
    return TokenLogprobs(int(token), float(chosen - norm), rank, tuple(pairs))
