"""Log probabilities and ranks of the raw model distribution: before penalties, temperature and every other stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.core.step import TokenLogprobs
from headway.sampling.logits import Logits
from headway.sampling.rows import RowFailure
from headway.sampling.select import largest


def token_logprobs(logits: Logits, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """What the model thought of `tokens`, and of the likeliest alternatives, at each row.

    For generated tokens the row is the one they were drawn from; for prompt tokens it is the one of the position
    before them.

    Args:
        logits: raw ones.
        tokens: one id per row.
        top: how many of the likeliest tokens to list.

    Returns:
        One entry per row. Rank 1 is the likeliest, equal ones by lowest id, so a token of rank r <= top is entry
        r - 1 of the list.

    Raises:
        RowFailure: a row holds a NaN or +inf, or nothing but -inf.
    """
    if not np.isfinite(logits.logsumexp).all():
        raise RowFailure(
            "the model's logits are not finite, so they have no log probabilities; is the checkpoint damaged?"
        )
    rows = zip(logits.rows, logits.logsumexp.tolist(), tokens, strict=True)
    return [_report(row, norm, token, top) for row, norm, token in rows]


def _report(row: np.ndarray, norm: float, token: int, top: int) -> TokenLogprobs:
    chosen = row[token]
    rank = 1 + int(np.count_nonzero(row > chosen)) + int(np.count_nonzero(row[:token] == chosen))
    likeliest = largest(row, top)
    pairs = zip(likeliest.tolist(), (row[likeliest] - norm).tolist(), strict=True)
    return TokenLogprobs(int(token), float(chosen - norm), rank, tuple(pairs))
