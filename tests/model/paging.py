"""A hand-made executor for model tests: sequences in a paged cache with scattered blocks, one step at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from headway.model.load import Model
from headway.ops.protocol import Backend, CacheLayout, GroupBatch, StepBatch


def step_batch(
    layout: CacheLayout,
    rows: Sequence[tuple[Sequence[int], int, Sequence[Sequence[int]]]],
    logits: str = "all",
    adapters: Sequence[int] | None = None,
    known: Sequence[int] | None = None,
) -> StepBatch:
    """rows: (new ids, position of the first, block table per group). logits: of "all" new tokens or the "last".
    adapters: of each row; None = none has one. known: tokens of each row when it was begun."""
    counts = [len(ids) for ids, _, _ in rows]
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    positions = np.concatenate([np.arange(start, start + len(ids)) for ids, start, _ in rows]).astype(np.int32)
    row_of = np.repeat(np.arange(len(rows)), counts)
    groups = []
    for group in range(len(layout.groups)):
        longest = max(len(tables[group]) for _, _, tables in rows)
        table = np.full((len(rows), longest), -1, np.int32)
        for row, (_, _, tables) in enumerate(rows):
            table[row, : len(tables[group])] = tables[group]
        block = table[row_of, positions // layout.block_size].astype(np.int64)
        groups.append(GroupBatch(table, block * layout.block_size + positions % layout.block_size))
    return StepBatch(
        ids=np.concatenate([ids for ids, _, _ in rows]).astype(np.int32),
        positions=positions,
        query_start=query_start,
        kv_len=np.array([start + len(ids) for ids, start, _ in rows], np.int32),
        groups=tuple(groups),
        logit_index=np.arange(query_start[-1], dtype=np.int32) if logits == "all" else query_start[1:] - 1,
        adapter=np.array(adapters or [0] * len(rows), np.int32),
        known=None if known is None else np.array(known, np.int32),
    )


class Bench:
    """Runs sequences by name; blocks are handed out in a scattered order."""

    def __init__(self, model: Model, backend: Backend, blocks: int = 64, block_size: int = 4) -> None:
        self.layout = CacheLayout(model.shape.groups, (blocks,) * len(model.shape.groups), block_size)
        backend.allocate(self.layout)
        self.program = backend.compile(model.forward)
        self.free = np.random.default_rng(0).permutation(blocks).tolist()
        self.tables: dict[str, list[int]] = {}
        self.length: dict[str, int] = {}
        self.known: dict[str, int] = {}  # how long the whole text is, of those that come in pieces

    def step(
        self, work: dict[str, Sequence[int]], logits: str = "all", adapters: Mapping[str, int] | None = None
    ) -> np.ndarray:
        """Append ids to the named sequences in one step -> logits of their new tokens, in order."""
        numbers = [(adapters or {}).get(name, 0) for name in work]
        rows = []
        for name, ids in work.items():
            start = self.length.get(name, 0)
            table = self.tables.setdefault(name, [])
            while len(table) * self.layout.block_size < start + len(ids):
                table.append(self.free.pop())
            rows.append((ids, start, [table] * len(self.layout.groups)))
            self.length[name] = start + len(ids)
        known = [self.known.get(name, self.length[name]) for name in work]
        return self.program.run(step_batch(self.layout, rows, logits, numbers, known)).rows.copy()
