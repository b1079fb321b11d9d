"""The admission queue, in two orders: by priority and arrival, and by how much there is to compute."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from headway.scheduling.row import Row


def _order(row: Row) -> tuple[int, int, int]:
    return row.order


def _work(row: Row) -> tuple[int, int, int, int]:
    return row.work


class AdmissionQueue:
    """Rows waiting for blocks; the bounds are the caller's to check. Two sorted lists: finding a place is O(log n), and
    making room for it a move of memory."""

    def __init__(self) -> None:
        self._rows: list[Row] = []  # by order
        self._ranked: list[Row] = []  # by work
        self._fresh: list[Row] = []  # to be ranked

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        """All waiting rows, by priority, then arrival."""
        return iter(self._rows)

    def push(self, row: Row) -> None:
        assert row not in self._rows[bisect_left(self._rows, row.order, key=_order) :][:1], f"{row} is already waiting"
        insort(self._rows, row, key=_order)
        row.remaining = None
        self._fresh.append(row)

    def first(self) -> Row | None:
        """The row that has waited longest among those of the best priority; still in the queue."""
        return self._rows[0] if self._rows else None

    def by_work(self, remaining: Callable[[Row], int]) -> list[Row]:
        """Rows by priority, then by what there is to compute; `remaining` is asked once for each. Read only."""
        for row in self._fresh:
            row.remaining = remaining(row)
            insort(self._ranked, row, key=_work)
        self._fresh.clear()
        return self._ranked

    def unordered(self) -> list[Row]:
        """What is in the second order, or will be."""
        return self._ranked + self._fresh

    def rerank(self, row: Row, remaining: int) -> None:
        """There is another amount to compute of a row than was found when it was ranked, if it was."""
        if row.remaining is None:
            return
        del self._ranked[bisect_left(self._ranked, row.work, key=_work)]
        row.remaining = remaining
        insort(self._ranked, row, key=_work)

    def remove(self, row: Row) -> None:
        """Take out a waiting row: admitted, cancelled or expired."""
        del self._rows[bisect_left(self._rows, row.order, key=_order)]
        if row.remaining is None:
            self._fresh.remove(row)
        else:
            del self._ranked[bisect_left(self._ranked, row.work, key=_work)]
