"""Verification of drafts: what is emitted of them, and the token after them.

    coupled     draft and model share the keyed noise of a position: a draft is accepted while it *is* what is drawn
                there. The tokens are those that come without drafts, to the bit, whatever was proposed.
    rejection   (Leviathan et al. 2023, Chen et al. 2023) a draft x of distribution q is accepted with probability
                min(1, p(x) / q(x)); at the first that is not, the token comes from the positive part of p - q, and
                after the last from p. The tokens follow the model's distribution, but are others than without drafts.
    accept-all  every draft is taken. Not lossless.

Everything here is arithmetic on distributions: the simulator and the tests run it on made-up ones, over many rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from headway.sampling.arithmetic import logarithm

MODES = ("coupled", "rejection", "accept-all")


def agreeing(drawn: Sequence[int], draft: Sequence[int], ends: Collection[int] = ()) -> int:
    """How many of `drawn` are emitted: up to the first that is not its draft, or that ends the row.

    Args:
        drawn: what the model draws at each drafted position and after the last; may be shorter.
        ends: ids after which nothing comes.
    """
    count = 0
    for token, drafted in zip(drawn, (*draft, None), strict=False):
        count += 1
        if token != drafted or token in ends:
            break
    return count


def acceptance(p: np.ndarray, q: np.ndarray, draft: np.ndarray) -> np.ndarray:
    """min(1, p(x) / q(x)) of drafts x -> float64 [...].

    Args:
        p, q: [..., vocab], distributions of the model and of the draft. draft: int [...].
    """
    at = draft[..., None]
    ours, theirs = (np.take_along_axis(one, at, -1)[..., 0] for one in (p, q))
    return np.minimum(1.0, ours / np.maximum(theirs, np.finfo(np.float64).tiny))


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """What to draw from where a draft was not accepted: the positive part of p - q, normalised; p where there is none
    (then p = q, and nothing is rejected but by rounding) -> float64 [..., vocab]."""
    rest = np.maximum(p - q, 0.0)
    total = rest.sum(axis=-1, keepdims=True)
    return np.where(total > 0, rest / np.where(total > 0, total, 1.0), p)


def race(p: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """A token of each distribution, by noise in (0, 1): the first to finish at -log(u) / p -> int [...]."""
    with np.errstate(divide="ignore"):
        return np.argmin(-logarithm(noise) / p, axis=-1)


def reject(
    p: np.ndarray, q: np.ndarray, draft: np.ndarray, uniforms: np.ndarray, noise: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`rejection` of many rows with k drafts each.

    Args:
        p: [rows, k + 1, vocab]. q: [rows, k, vocab]. draft: int [rows, k].
        uniforms: [rows, k], independent of the drafts. noise: [rows, k + 1, vocab], independent of both.

    Returns:
        How many drafts of each row are accepted, and the token after them; int [rows] each.
    """
    rows, k = draft.shape
    taken = uniforms < acceptance(p[:, :k], q, draft)
    accepted = np.where(taken.all(axis=1), k, np.argmin(taken, axis=1)) if k else np.zeros(rows, np.int64)
    every = np.arange(rows)
    nothing = np.zeros((rows, 1, p.shape[-1]))  # after the last draft, all of p is left
    rest = residual(p[every, accepted], np.concatenate((q, nothing), axis=1)[every, accepted])
    return accepted, race(rest, noise[every, accepted])
