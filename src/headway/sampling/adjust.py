"""What changes logits before anything is drawn: penalties, then bias, then the masks of min_tokens and of grammars.

All but the last touch few tokens of a row. They are written into the rows, of all adjusted rows at once, and taken back
after the draw: no row is copied. A grammar's mask may forbid nearly all tokens, so its row is kept aside meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.sampling.grammar import allowed
from headway.sampling.logits import TILE, Logits, in_tiles
from headway.sampling.rows import RowState


@dataclass(frozen=True)
class Change:
    """Entries of logits that were overwritten, and what they were.

    Attributes:
        at: int64 [n], indices into the flattened rows; may repeat.
        before: float32 [n].
        tiles: int64 [n], indices into the flattened peaks.
        peaks: float32 [n], what those were.
    """

    at: np.ndarray
    before: np.ndarray
    tiles: np.ndarray
    peaks: np.ndarray

    def undo(self, logits: Logits) -> None:
        logits.rows.reshape(-1)[self.at] = self.before
        logits.peaks.reshape(-1)[self.tiles] = self.peaks


@dataclass(frozen=True)
class Masking:
    """Rows of logits that were masked, as they were.

    Attributes:
        numbers: of the rows.
        rows, peaks: float32 [n, vocab] and [n, tiles].
    """

    numbers: Sequence[int]
    rows: np.ndarray
    peaks: np.ndarray

    @classmethod
    def of(cls, logits: Logits, numbers: Sequence[int]) -> Masking:
        return cls(numbers, logits.rows[numbers], logits.peaks[numbers])

    def undo(self, logits: Logits) -> None:
        logits.rows[self.numbers] = self.rows
        logits.peaks[self.numbers] = self.peaks


def adjust(logits: np.ndarray, row: RowState, position: int) -> np.ndarray:
    """Of one row -> float32 [vocab]: `logits` itself if nothing applies.

    Raises:
        RowFailure: its grammar cannot be followed any further.
    """
    mask = row.mask(position, len(logits))
    if not row.adjusts and mask is None:
        return logits
    adjusted = logits.copy()
    _write(adjusted, *_touched([0], [row], [position]), [row])
    if mask is not None:
        adjusted[~allowed(mask[None], len(logits))[0]] = -np.inf
    return adjusted


def mask_rows(logits: Logits, numbers: Sequence[int], masks: np.ndarray) -> Masking:
    """Forbid tokens: rows `numbers` of the logits may only draw what is set in uint32 [n, words], a bit per
    token, the lowest first. Peaks are kept true."""
    before = Masking.of(logits, numbers)
    vocab = logits.rows.shape[1]
    masked = np.where(allowed(masks, vocab), before.rows, np.float32(-np.inf))
    logits.rows[numbers] = masked
    logits.peaks[numbers] = in_tiles(masked, -np.inf).max(axis=2)
    return before


def adjust_rows(logits: Logits, numbers: Sequence[int], rows: Sequence[RowState], positions: Sequence[int]) -> Change:
    """Of several: rows `numbers` of the logits belong to `rows`, which draw at `positions`. Peaks are kept true."""
    vocab, tiles = logits.rows.shape[1], logits.peaks.shape[1]
    flat, peaks = logits.rows.reshape(-1), logits.peaks.reshape(-1)
    parts, lengths = _touched([number * vocab for number in numbers], rows, positions)
    at = np.concatenate(parts)
    line, id = np.divmod(at, vocab)
    tile = line * tiles + id // TILE
    change = Change(at, flat[at], tile, peaks[tile])
    _write(flat, parts, lengths, rows)
    first = line * vocab + id // TILE * TILE
    neighbours = np.minimum(first[:, None] + np.arange(TILE), (line * vocab + vocab - 1)[:, None])  # the last is short
    peaks[tile] = flat[neighbours].max(axis=1)
    return change


def _touched(
    offsets: Sequence[int], rows: Sequence[RowState], positions: Sequence[int]
) -> tuple[list[np.ndarray], list[list[int]]]:
    """Indices into flattened rows that penalties for what was seen, for output, biases and masks touch; and how many
    of each are every row's."""
    none = np.empty(0, np.int64)
    ids = [
        [none if row.seen is None else row.seen.ids for row in rows],
        [none if row.output is None else row.output.ids for row in rows],
        [row.bias_ids for row in rows],
        [
            row.forbidden(position) if row.grammar is None else none
            for row, position in zip(rows, positions, strict=True)
        ],
    ]
    lengths = [[len(one) for one in kind] for kind in ids]
    starts = np.array(offsets, np.int64)
    return [np.concatenate(kind) + np.repeat(starts, count) for kind, count in zip(ids, lengths, strict=True)], lengths


def _write(x: np.ndarray, parts: list[np.ndarray], lengths: list[list[int]], rows: Sequence[RowState]) -> None:
    seen, output, biased, held = parts
    if len(seen):  # CTRL's penalty (Keskar et al. 2019): towards lower probability on either side of zero
        penalty = np.repeat(np.array([row.params.repetition_penalty for row in rows], np.float32), lengths[0])
        values = x[seen]
        x[seen] = np.where(values > 0, values / penalty, values * penalty)
    if len(output):
        counts = np.concatenate([row.output.counts for row in rows if row.output is not None])
        frequency = np.repeat([row.params.frequency_penalty for row in rows], lengths[1])
        presence = np.repeat([row.params.presence_penalty for row in rows], lengths[1])
        x[output] -= (frequency * counts + presence).astype(np.float32)
    if len(biased):
        x[biased] += np.concatenate([row.bias for row in rows])
    x[held] = -np.inf
