"""Rows an executor holds, and the `StepBatch` arrays built from them and a plan.

The scheduler decides everything; this only remembers, per row, the tokens and the block table that plans brought, and
lays them out for the backend. Every row has a slot, its line in the tables. A step is put together in lists, which for
a few dozen numbers are quicker than arrays, and then written into arrays that stay from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headway.core.step import BlockIds, Capabilities, RowInit, StepPlan, Work
from headway.executor.pooling import Pool
from headway.ops.protocol import NO_ROWS, GroupBatch, StepBatch


@dataclass(frozen=True)
class Layout:
    """A step, laid out; overwritten by the next.

    Attributes:
        batch: for the backend.
        slots: int32 [rows], of each row.
        last: int32 [rows], each row's last row of logits (of a row that wants none, that of the row before).
    """

    batch: StepBatch
    slots: np.ndarray
    last: np.ndarray


class BatchRow:
    """One row.

    Attributes:
        slot: its line in all tables.
        init: what it was created from.
        tokens: its ids, and behind them the proposed ones.
        blocks: per KV group, its block table.
        pool: what its hidden states come to so far, if they are pooled.
    """

    __slots__ = ("blocks", "init", "pool", "slot", "tokens")

    def __init__(self, slot: int, init: RowInit, groups: int) -> None:
        self.slot = slot
        self.init = init
        self.tokens = list(init.tokens)
        self.blocks: list[list[int]] = [[] for _ in range(groups)]
        self.pool: Pool | None = None

    def put(self, position: int, tokens: Sequence[int]) -> None:
        """These ids follow the first `position` ones, instead of whatever did."""
        self.tokens[position:] = tokens


class BatchRows:
    """All live rows, kept in step with the plans.

    Args:
        limits: what there is room for.
        number: of a row's adapter.

    Attributes:
        by_id: the rows by request.
    """

    def __init__(self, limits: Capabilities, number: Callable[[RowInit], int] = lambda init: 0) -> None:
        self._number = number
        self._block_size = limits.block_size
        rows, most = limits.max_rows, limits.max_tokens_per_step
        max_blocks = -(-limits.max_model_len // limits.block_size) + 1
        self.by_id: dict[str, BatchRow] = {}
        self._free = list(range(rows))[::-1]
        self._tables = [np.full((rows, max_blocks), -1, np.int32) for _ in limits.blocks]
        self._adapter, self._known = (np.zeros(rows, np.int32) for _ in range(2))  # by slot, as the tables are
        # Of the step being laid out.
        self._slots, self._kv_len = (np.zeros(rows, np.int32) for _ in range(2))
        self._query_start = np.zeros(rows + 1, np.int32)
        self._ids, self._positions = (np.zeros(most, np.int32) for _ in range(2))
        self._cache_slots = [np.zeros(most, np.int64) for _ in limits.blocks]
        self._upwards = np.arange(most + 1, dtype=np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Drop rows that are gone, create the new ones, append the blocks and the drafts of this step."""
        for gone in plan.gone:
            row = self.by_id.pop(gone, None)
            if row is not None:
                self._free.append(row.slot)
        for init in plan.new:
            row = self.by_id[init.id] = BatchRow(self._free.pop(), init, len(self._tables))
            row.pool = None if init.params.pooling is None else Pool(init.params.pooling, init.prompt_len)
            self._adapter[row.slot] = self._number(init)
            self._known[row.slot] = len(init.tokens)
            self._extend(row, init.blocks)
        for work in plan.work:
            if work.blocks:
                self._extend(self.by_id[work.id], work.blocks)
            if work.draft:
                self.by_id[work.id].put(work.start + work.count - len(work.draft), work.draft)

    def _extend(self, row: BatchRow, blocks: BlockIds) -> None:
        for table, known, added in zip(self._tables, row.blocks, blocks, strict=False):
            if added:
                table[row.slot, len(known) : len(known) + len(added)] = added
                known += added

    def lay_out(self, work: Sequence[Work]) -> Layout:
        """A plan's rows one after another, without padding."""
        rows = [self.by_id[one.id] for one in work]
        n, ends = len(work), [one.start + one.count for one in work]
        slots, kv_len = self._slots[:n], self._kv_len[:n]
        slots[:] = [row.slot for row in rows]
        kv_len[:] = ends
        if sum([one.count for one in work]) == n:  # one token each: decoding
            query_start, at = self._upwards[: n + 1], [one.start for one in work]
            ids = [row.tokens[position] for row, position in zip(rows, at, strict=True)]
            owners = rows
        else:
            query_start = self._query_start[: n + 1]
            np.cumsum([one.count for one in work], out=query_start[1:])
            ids, at, owners = [], [], []
            for row, one, end in zip(rows, work, ends, strict=True):
                ids += row.tokens[one.start : end]
                at += range(one.start, end)
                owners += [row] * one.count
        total = len(ids)
        self._ids[:total] = ids
        self._positions[:total] = at
        wanted = [one.logits for one in work]
        each_one = wanted == [1] * n
        last = self._upwards[:n] if each_one else np.cumsum(wanted, dtype=np.int32) - 1
        batch = StepBatch(
            ids=self._ids[:total],
            positions=self._positions[:total],
            query_start=query_start,
            kv_len=kv_len,
            groups=tuple([self._group(group, slots, max(ends), owners, at) for group in range(len(self._tables))]),
            logit_index=last if each_one and total == n else _last(query_start[1:], wanted),
            adapter=self._adapter[slots],
            known=self._known[slots],
            pool_index=_pooled(rows, work, query_start),
        )
        return Layout(batch, slots, last)

    def _group(
        self, group: int, slots: np.ndarray, longest: int, owners: Sequence[BatchRow], at: Sequence[int]
    ) -> GroupBatch:
        """Args: the group; slot of each row; the longest row; the row and the position of each new token."""
        size = self._block_size
        cache_slots = self._cache_slots[group][: len(at)]
        cache_slots[:] = [
            row.blocks[group][position // size] * size + position % size
            for row, position in zip(owners, at, strict=True)
        ]
        return GroupBatch(self._tables[group][slots, : -(-longest // size)], cache_slots)


def _pooled(rows: Sequence[BatchRow], work: Sequence[Work], query_start: np.ndarray) -> np.ndarray:
    """Indices of the tokens whose hidden states are pooled -> int32."""
    indices: list[int] = []
    for row, one, first in zip(rows, work, query_start.tolist(), strict=False):
        if row.pool is not None:
            indices += [first + position - one.start for position in row.pool.positions(one.start, one.count)]
    return np.array(indices, np.int32) if indices else NO_ROWS


def _last(ends: np.ndarray, wanted: Sequence[int]) -> np.ndarray:
    """Token indices of the last `wanted[r]` tokens before each `ends[r]` -> int32 [sum(wanted)]."""
    indices: list[int] = []
    for end, count in zip(ends.tolist(), wanted, strict=True):
        indices += range(end - count, end)
    return np.array(indices, np.int32)
