"""The admission queue: bounded, by priority, then arrival."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from headway.scheduling.row import Row


class AdmissionQueue:
    """Rows waiting for blocks. Adding and removing are O(log n), amortised; the bounds are the caller's to check.

    Attributes:
        prompt_tokens: prompt tokens of all waiting rows.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Row]] = []
        self._rows: dict[tuple[int, int, int], Row] = {}  # by order, which is unique; what is not here is stale
        self.prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        """All waiting rows, in no particular order."""
        return iter(self._rows.values())

    def push(self, row: Row) -> None:
        assert row.order not in self._rows, f"{row} is already waiting"
        self._rows[row.order] = row
        heapq.heappush(self._heap, (row.order, row))
        self.prompt_tokens += row.request.prompt_len

    def first(self) -> Row | None:
        """The row to admit next, still in the queue."""
        while self._heap and self._heap[0][0] not in self._rows:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def remove(self, row: Row) -> None:
        """Take out a waiting row: admitted, cancelled or expired. Its place in the heap goes stale; when most of the
        heap is, it is built anew."""
        del self._rows[row.order]
        if len(self._heap) > 2 * len(self._rows) + 64:
            self._heap = list(self._rows.items())
            heapq.heapify(self._heap)
        self.prompt_tokens -= row.request.prompt_len
