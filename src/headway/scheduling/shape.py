"""The size of a step, added up row by row while it is planned, so that `what if` questions are cheap."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.step import StepPlan, StepShape, keys_read, pairs_computed


class ShapeBuilder:
    """A `StepShape` under construction. O(1) per row and KV group. skew: of the shape."""

    def __init__(self, windows: Sequence[int | None], skew: float | None = None) -> None:
        self._windows = windows
        self._skew = skew
        self.tokens = 0
        self.rows = 0
        self.logit_rows = 0
        self.copies = 0
        self._keys = [0] * len(windows)  # of rows with more than one new token, drafts apart
        self._pairs = [0] * len(windows)
        self._decode_keys = [0] * len(windows)  # of rows with one
        self._decode_pairs = [0] * len(windows)

    def add(self, start: int, count: int, logits: int, drafts: int = 0) -> None:
        """One row computing positions [start, start + count), with logits at `logits` of them; the last `drafts` are of
        proposed tokens."""
        self.tokens += count
        self.rows += 1
        self.logit_rows += logits
        for group, window in enumerate(self._windows):
            if count == 1:
                keys = start + 1 if window is None else keys_read(start, 1, window)
                self._decode_keys[group] += keys
                self._decode_pairs[group] += keys
            elif count == 1 + drafts:
                self._decode_keys[group] += keys_read(start, count, window)
                self._decode_pairs[group] += pairs_computed(start, count, window)
            else:
                self._keys[group] += keys_read(start, count, window)
                self._pairs[group] += pairs_computed(start, count, window)

    def add_decodes(self, starts: Sequence[int]) -> None:
        """Rows computing one position each, with logits there."""
        self.tokens += len(starts)
        self.rows += len(starts)
        self.logit_rows += len(starts)
        for group, window in enumerate(self._windows):
            more = sum(starts) + len(starts) if window is None else sum([min(start + 1, window) for start in starts])
            self._decode_keys[group] += more
            self._decode_pairs[group] += more

    @property
    def _sums(self) -> tuple[list[int], ...]:
        return self._keys, self._pairs, self._decode_keys, self._decode_pairs

    def build(self) -> StepShape:
        decode = tuple(self._decode_keys)
        keys = tuple([a + b for a, b in zip(self._keys, decode, strict=True)])
        decode_pairs = tuple(self._decode_pairs)
        pairs = tuple([a + b for a, b in zip(self._pairs, decode_pairs, strict=True)])
        return StepShape(
            self.tokens, self.rows, self.logit_rows, keys, pairs, decode, decode_pairs, self.copies, None, self._skew
        )

    def with_row(self, start: int, count: int, logits: int) -> StepShape:
        """The shape if one more row came; this builder is not changed."""
        one = ShapeBuilder(self._windows, self._skew)
        one.add(start, count, logits)
        for mine, theirs in zip(one._sums, self._sums, strict=True):
            mine[:] = [a + b for a, b in zip(mine, theirs, strict=True)]
        one.tokens += self.tokens
        one.rows += self.rows
        one.logit_rows += self.logit_rows
        one.copies += self.copies
        return one.build()


def shape_of(plan: StepPlan, windows: Sequence[int | None]) -> StepShape:
    """The size of a finished plan."""
    builder = ShapeBuilder(windows)
    for work in plan.work:
        builder.add(work.start, work.count, work.logits, len(work.draft))
    builder.copies = len(plan.copies)
    return builder.build()
