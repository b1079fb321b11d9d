"""Rows an executor holds, and the `StepBatch` arrays built from them and a plan.

The scheduler decides everything; this only remembers, per row, the tokens and the block table that plans told it,
and lays them out for the backend. Every row has a slot, which is its line in all arrays; a step of decoding is laid out
by a few operations over slots, into arrays that stay from step to step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.core.step import Capabilities, RowInit, StepPlan, Work
from headway.ops.protocol import GroupBatch, StepBatch


class Rows:
    """All live rows, kept in step with the plans.

    Attributes:
        slots: slot by request id.
        inits: by slot, what a row was created from; None where the slot is free.
        tokens: int32 [slots, max_model_len + 1], token ids as far as they are known.
    """

    def __init__(self, limits: Capabilities) -> None:
        self._block_size = limits.block_size
        rows, most = limits.max_rows, limits.max_tokens_per_step
        max_blocks = -(-limits.max_model_len // limits.block_size) + 1
        groups = range(len(limits.blocks))
        self.slots: dict[str, int] = {}
        self.inits: list[RowInit | None] = [None] * rows
        self.tokens = np.zeros((rows, limits.max_model_len + 1), np.int32)
        self._free = list(range(rows))[::-1]
        self._tables = [np.full((rows, max_blocks), -1, np.int32) for _ in groups]
        self._held = [[0] * rows for _ in groups]  # entries of each table in use
        # Of the step being laid out; rows first, then tokens.
        self._slot, self._start, self._count, self._kv_len = (np.empty(rows, np.int32) for _ in range(4))
        self._query_start = np.zeros(rows + 1, np.int32)
        self._adapter = np.zeros(rows, np.int32)
        self._ids, self._positions = np.empty(most, np.int32), np.empty(most, np.int32)
        self._at, self._block = np.empty(most, np.int64), np.empty(most, np.int64)
        self._slots_of_group = [np.empty(most, np.int64) for _ in groups]
        self._upwards = np.arange(most, dtype=np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Drop rows that are gone, create the new ones, append the blocks and the drafts of this step."""
        for gone in plan.gone:
            slot = self.slots.pop(gone, None)
            if slot is not None:
                self.inits[slot] = None
                self._free.append(slot)
        for init in plan.new:
            self._create(init)
        for work in plan.work:
            if work.blocks:
                self._extend(self.slots[work.id], work.blocks)
            if work.draft:  # proposed ids sit behind the row's own until they are accepted
                end = work.start + work.count
                self.tokens[self.slots[work.id], end - len(work.draft) : end] = work.draft

    def _create(self, init: RowInit) -> None:
        slot = self.slots[init.id] = self._free.pop()
        self.inits[slot] = init
        self.tokens[slot, : len(init.tokens)] = init.tokens
        for table, held in zip(self._tables, self._held, strict=True):
            table[slot] = -1
            held[slot] = 0
        self._extend(slot, init.blocks)

    def _extend(self, slot: int, blocks: Sequence[Sequence[int]]) -> None:
        for table, held, added in zip(self._tables, self._held, blocks, strict=False):
            if added:
                start = held[slot]
                held[slot] = start + len(added)
                table[slot, start : start + len(added)] = added

    def batch(self, work: Sequence[Work]) -> tuple[StepBatch, np.ndarray]:
        """Lay out a plan's rows one after another, without padding -> the batch, and the slot of each row (int32).

        Both are overwritten by the next step's.
        """
        n = len(work)
        slots, starts, counts, kv_len = (a[:n] for a in (self._slot, self._start, self._count, self._kv_len))
        slots[:] = [self.slots[one.id] for one in work]
        starts[:] = [one.start for one in work]
        counts[:] = [one.count for one in work]
        np.add(starts, counts, out=kv_len)
        query_start = self._query_start[: n + 1]
        np.cumsum(counts, out=query_start[1:])
        total = int(query_start[n])
        decoding = total == n  # one token each
        of_row = None if decoding else np.repeat(self._upwards[:n], counts)  # [tokens]

        positions, ids, at = self._positions[:total], self._ids[:total], self._at[:total]
        if of_row is None:
            positions[:] = starts
        else:
            np.subtract(self._upwards[:total], np.repeat(query_start[:n] - starts, counts), out=positions)
        np.multiply(slots if of_row is None else slots[of_row], self.tokens.shape[1], out=at)
        at += positions
        self.tokens.reshape(-1).take(at, out=ids, mode="clip")

        blocks = -(-int(kv_len.max()) // self._block_size)
        groups = tuple(self._group(group, slots, blocks, of_row, positions) for group in range(len(self._tables)))
        wanted = [one.logits for one in work]
        logit_index = self._upwards[:n] if decoding and min(wanted) == 1 else _last(query_start[1:], wanted)
        return StepBatch(ids, positions, query_start, kv_len, groups, logit_index, self._adapter[:n]), slots

    def _group(
        self, group: int, slots: np.ndarray, blocks: int, of_row: np.ndarray | None, positions: np.ndarray
    ) -> GroupBatch:
        total = len(positions)
        table = self._tables[group][slots, :blocks]  # [rows, blocks]
        at, block, target = self._at[:total], self._block[:total], self._slots_of_group[group][:total]
        np.floor_divide(positions, self._block_size, out=block)
        np.multiply(self._upwards[:total] if of_row is None else of_row, blocks, out=at)
        at += block
        block *= -self._block_size
        block += positions  # offset within the block
        target[:] = table.reshape(-1)[at]
        target *= self._block_size
        target += block
        return GroupBatch(table, target)


def _last(ends: np.ndarray, wanted: Sequence[int]) -> np.ndarray:
    """Token indices of the last `wanted[r]` tokens before each `ends[r]` -> int32 [sum(wanted)]."""
    counts = np.array(wanted, np.int32)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    rank = np.arange(int(offsets[-1])) - np.repeat(offsets[:-1], counts)
    return (np.repeat(ends - counts, counts) + rank).astype(np.int32)
