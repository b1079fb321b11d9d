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
from headway.executor.pooling import PooledRow
from headway.ops.protocol import NO_ROWS, GroupBatch, StepBatch


@dataclass(frozen=True)
class StepLayout:
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
        self.pool: PooledRow | None = None

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
            row.pool = None if init.params.pooling is None else PooledRow(init.params.pooling, init.prompt_len)
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

    def lay_out(self, work: Sequence[Work]) -> StepLayout:
        """A plan's rows one after another, without padding."""
        rows = [self.by_id[one.id] for one in work]
        starts, counts, wanted = [one.start for one in work], [one.count for one in work], [one.logits for one in work]
        n, total = len(work), sum(counts)
        slots, kv_len, positions = self._slots[:n], self._kv_len[:n], self._positions[:total]
        slots[:] = [row.slot for row in rows]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        kv_len[:] = ends
        decoding = total == n  # one token each
        if decoding:
            query_start = self._upwards[: n + 1]
            ids = [row.tokens[start] for row, start in zip(rows, starts, strict=True)]
            positions[:] = starts
            cache_slots = self._decoding_into(rows, starts)
        else:
            query_start = self._query_start[: n + 1]
            np.cumsum(counts, out=query_start[1:])
            ids = []
            for row, start, count in zip(rows, starts, counts, strict=True):
                ids += row.tokens[start : start + count]
            np.add(np.repeat(kv_len - query_start[1:], counts), self._upwards[:total], out=positions)
            cache_slots = self._written_into(np.repeat(slots, counts), positions)
        self._ids[:total] = ids
        each_one = wanted == [1] * n
        last = self._upwards[:n] if each_one else np.cumsum(wanted, dtype=np.int32) - 1
        blocks = -(-max(ends) // self._block_size)
        pools = any(one.pool for one in work)
        batch = StepBatch(
            ids=self._ids[:total],
            positions=positions,
            query_start=query_start,
            kv_len=kv_len,
            groups=tuple(
                [GroupBatch(table[slots, :blocks], to) for table, to in zip(self._tables, cache_slots, strict=True)]
            ),
            logit_index=last if each_one and decoding else _last(query_start[1:], wanted),
            adapter=self._adapter[slots],
            known=self._known[slots],
            pool_index=_pooled(rows, work, query_start) if pools else NO_ROWS,
        )
        return StepLayout(batch, slots, last)

    def _decoding_into(self, rows: Sequence[BatchRow], starts: Sequence[int]) -> list[np.ndarray]:
        """Where in each group's cache rows write that have one new token, at `starts` -> int64 [rows] per group."""
        size, into = self._block_size, []
        for group, buffer in enumerate(self._cache_slots):
            slots = [row.blocks[group][at // size] * size + at % size for row, at in zip(rows, starts, strict=True)]
            buffer[: len(slots)] = slots
            into.append(buffer[: len(slots)])
        return into

    def _written_into(self, owners: np.ndarray, positions: np.ndarray) -> list[np.ndarray]:
        """The same of any number of tokens, by the slot of the row and the position of each."""
        into = []
        for table, buffer in zip(self._tables, self._cache_slots, strict=True):
            slots = buffer[: len(positions)]
            np.multiply(table[owners, positions // self._block_size], self._block_size, out=slots)
            slots += positions % self._block_size
            into.append(slots)
        return into


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
