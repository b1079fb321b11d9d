"""Rows an executor holds, and the `StepBatch` arrays built from them and a plan.

The scheduler decides everything; this only remembers, per row, the tokens and the block table that plans told it,
and lays them out for the backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.core.step import RowInit, StepPlan, Work
from headway.ops.protocol import GroupBatch, StepBatch


class Row:
    """What stays with a row between steps.

    Attributes:
        init: the RowInit it was created from.
        tokens: int32 [capacity], its ids; the first `length` are valid.
        tables: per KV group, int32 [max_blocks], block ids; the first `held[group]` are valid.
    """

    __slots__ = ("held", "init", "length", "tables", "tokens")

    def __init__(self, init: RowInit, max_len: int, max_blocks: int) -> None:
        self.init = init
        self.length = len(init.tokens)
        self.tokens = np.empty(max_len + 1, np.int32)
        self.tokens[: self.length] = init.tokens
        self.tables = [np.full(max_blocks, -1, np.int32) for _ in init.blocks]
        self.held = [0] * len(init.blocks)
        self.extend_tables(init.blocks)

    def extend_tables(self, blocks: Sequence[Sequence[int]]) -> None:
        for group, added in enumerate(blocks):
            if added:
                start = self.held[group]
                self.held[group] = start + len(added)
                self.tables[group][start : start + len(added)] = added

    def append(self, tokens: Sequence[int]) -> None:
        self.tokens[self.length : self.length + len(tokens)] = tokens
        self.length += len(tokens)


class Rows:
    """All live rows by id, kept in step with the plans."""

    def __init__(self, groups: int, block_size: int, max_len: int) -> None:
        self.groups = groups
        self.block_size = block_size
        self.max_len = max_len
        self.max_blocks = -(-max_len // block_size) + 1
        self.by_id: dict[str, Row] = {}

    def apply(self, plan: StepPlan) -> None:
        """Drop rows that are gone, create the new ones, append the blocks that this step adds."""
        for gone in plan.gone:
            self.by_id.pop(gone, None)
        for init in plan.new:
            self.by_id[init.id] = Row(init, self.max_len, self.max_blocks)
        for work in plan.work:
            row = self.by_id[work.id]
            if work.blocks:
                row.extend_tables(work.blocks)
            if work.draft:  # proposed ids sit behind the row's own until they are accepted
                row.tokens[row.length : row.length + len(work.draft)] = work.draft

    def batch(self, work: Sequence[Work]) -> StepBatch:
        """Lay out a plan's rows one after another, without padding."""
        counts = np.array([item.count for item in work], np.int32)
        starts = np.array([item.start for item in work], np.int32)
        query_start = np.zeros(len(work) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        total = int(query_start[-1])
        row_of_token = np.repeat(np.arange(len(work)), counts)  # [tokens]
        positions = (np.arange(total, dtype=np.int32) - query_start[row_of_token] + starts[row_of_token]).astype(
            np.int32
        )

        rows = [self.by_id[item.id] for item in work]
        ids = np.empty(total, np.int32)
        for row, item, begin in zip(rows, work, query_start.tolist(), strict=False):
            ids[begin : begin + item.count] = row.tokens[item.start : item.start + item.count]

        kv_len = starts + counts
        blocks = -(-int(kv_len.max()) // self.block_size)
        groups = tuple(self._group(rows, group, blocks, row_of_token, positions) for group in range(self.groups))
        wanted = np.array([item.logits for item in work], np.int32)
        return StepBatch(
            ids=ids,
            positions=positions,
            query_start=query_start,
            kv_len=kv_len,
            groups=groups,
            logit_index=_last(query_start[1:], wanted),
            adapter=np.zeros(len(work), np.int32),
        )

    def _group(
        self, rows: Sequence[Row], group: int, blocks: int, row_of_token: np.ndarray, positions: np.ndarray
    ) -> GroupBatch:
        table = np.stack([row.tables[group][:blocks] for row in rows])  # [rows, blocks]
        block = table[row_of_token, positions // self.block_size].astype(np.int64)
        return GroupBatch(table, block * self.block_size + positions % self.block_size)


def _last(ends: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Token indices of the last `wanted[r]` tokens before each `ends[r]` -> int32 [sum(wanted)]."""
    offsets = np.concatenate(([0], np.cumsum(wanted)))
    rank = np.arange(int(offsets[-1])) - np.repeat(offsets[:-1], wanted)
    return (np.repeat(ends - wanted, wanted) + rank).astype(np.int32)
