"""What the output matrix of a model leaves for the sampler: logits, and a summary made while they were in cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headway.sampling.arithmetic import exponential, logarithm

TILE = 32  # logits per entry of a summary

_LOWEST = np.finfo(np.float32).min


@dataclass(frozen=True)
class Logits:
    """Logits of a step, valid until the next one. The sampler may change them: they are its to work in.

    Attributes:
        rows: float32 [rows, vocab].
        peaks: float32 [rows, tiles], the largest logit of each `TILE` neighbouring ones. Of a tile with a NaN it may be
            any of its logits.
        logsumexp: float64 [rows], log(sum(exp(logits))). NaN if a logit is NaN or +inf, -inf if all are -inf.
    """

    rows: np.ndarray
    peaks: np.ndarray
    logsumexp: np.ndarray

    def part(self, first: int, end: int) -> Logits:
        """Rows [first, end)."""
        return Logits(self.rows[first:end], self.peaks[first:end], self.logsumexp[first:end])


def summarise(rows: np.ndarray) -> Logits:
    """The specification of the summary that a backend makes along with float32 rows [rows, vocab].

    Sums have a fixed order, so that the native kernels' are the same bits: the 32 numbers of a tile, and then 32 tiles,
    are added by halves (16 + 16, 8 + 8, ...) in float32; the sums of 32 tiles one after another in float64.
    """
    tiles = in_tiles(rows, -np.inf)  # [rows, tiles, TILE]
    with np.errstate(invalid="ignore", over="ignore"):  # infinities and NaN come out as NaN
        peaks = tiles.max(axis=2)
        sums = _by_halves(exponential(tiles - np.maximum(peaks, _LOWEST)[..., None]))
        top = np.maximum(peaks.max(axis=1), _LOWEST)  # [rows]
        shares = _by_halves(in_tiles(sums * exponential(peaks - top[:, None]), 0.0))
        totals = np.cumsum(shares, axis=1, dtype=np.float64)[:, -1]
        return Logits(rows, peaks, top.astype(np.float64) + logarithm(totals))


def in_tiles(x: np.ndarray, filler: float) -> np.ndarray:
    """[rows, n] -> [rows, ceil(n / TILE), TILE], filled up."""
    count, width = x.shape
    groups = -(-width // TILE)
    if groups * TILE == width:
        return x.reshape(count, groups, TILE)
    padded = np.full((count, groups * TILE), filler, np.float32)
    padded[:, :width] = x
    return padded.reshape(count, groups, TILE)


def _by_halves(x: np.ndarray) -> np.ndarray:
    """Sums over the last axis, TILE wide."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]
