"""Hidden states of a row, pooled as the pieces of its prompt come."""

from __future__ import annotations

import numpy as np


class PooledRow:
    """One row's. The outcome does not depend on how its prompt was cut: sums are made in float64, in order.

    Args:
        kind: one of `POOLINGS`.
        length: tokens of the prompt.
    """

    __slots__ = ("_kind", "_length", "_sum")

    def __init__(self, kind: str, length: int) -> None:
        self._kind = kind
        self._length = length
        self._sum: np.ndarray | None = None

    def positions(self, start: int, count: int) -> range:
        """Which of the positions [start, start + count) count."""
        end = start + count
        if self._kind == "mean":
            return range(start, end)
        at = 0 if self._kind == "cls" else self._length - 1
        return range(max(start, at), min(end, at + 1))

    def take(self, hidden: np.ndarray) -> None:
        """Hidden states of `positions` -> float32 [positions, d]."""
        for state in hidden:
            self._sum = state.astype(np.float64) if self._sum is None else self._sum + state

    def outcome(self) -> np.ndarray:
        """Of a prompt that is complete -> float32 [d]."""
        assert self._sum is not None, "every kind has a position of the prompt"
        return (self._sum / self._length if self._kind == "mean" else self._sum).astype(np.float32)
