"""Rows of the sampler, made and drawn from by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.core.request import SamplingParams
from headway.core.step import RowInit
from headway.sampling.logits import summarise
from headway.sampling.operations import LogitOps, NumpyLogits
from headway.sampling.rows import RowState
from headway.sampling.sampler import Sampled, Sampler

REFERENCE = NumpyLogits()


def row(
    tokens: tuple[int, ...] = (1, 2), prompt_len: int = 2, choice: int = 0, stop: tuple[int, ...] = (), **fields: object
) -> RowState:
    params = SamplingParams(**{"seed": 1, **fields})  # type: ignore[arg-type]
    return RowState(RowInit("r", tokens, prompt_len, params, choice, stop))


def sample(
    logits: np.ndarray, rows: Sequence[RowState], positions: Sequence[int], ops: LogitOps = REFERENCE
) -> Sampled:
    """One token per row of `logits` [rows, vocab]; slots are taken from the last to the first. Fails if the
    logits are not as before afterwards."""
    sampler = Sampler(len(rows), ops)
    slots = np.arange(len(rows), dtype=np.int32)[::-1].copy()
    for slot, state in zip(slots.tolist(), rows, strict=True):
        sampler.add(slot, state)
    numbers = np.arange(len(rows), dtype=np.int32)
    summary = summarise(logits)
    before = summary.rows.copy(), summary.peaks.copy()
    sampled = sampler.sample(summary, slots, numbers, np.array(positions, np.int32))
    np.testing.assert_array_equal(summary.rows, before[0])
    np.testing.assert_array_equal(summary.peaks, before[1])
    return sampled


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom, over cells that expect at least five."""
    expected = probabilities * counts.sum()
    cells = expected >= 5
    assert counts[probabilities == 0].sum() == 0
    observed = np.append(counts[cells], counts[~cells].sum())
    wanted = np.append(expected[cells], expected[~cells].sum())
    filled = wanted > 0
    return float(((observed - wanted)[filled] ** 2 / wanted[filled]).sum()), int(filled.sum()) - 1


def follows(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """p > 0.001, by the quantile of Wilson and Hilferty (1931)."""
    statistic, degrees = chi_square(counts, probabilities / probabilities.sum())
    if degrees:
        part = 2 / (9 * degrees)
        assert statistic < degrees * (1 - part + 3.09 * part**0.5) ** 3
