"""What an engine holds at one moment, for those who look: its rows, and who has which cache block. No text, no token.

Made only when somebody asks, between two steps; `seconds` says what that cost, so that whoever asks can ask seldom
enough.
"""

from __future__ import annotations

import time

import msgspec

from headway.cache.explain import left_at
from headway.cache.kv import KVCache
from headway.cache.pool import BlockPool
from headway.core.clock import to_seconds
from headway.scheduling.row import Place, Row
from headway.scheduling.state import State

FREE, CACHED, OWNED, SHARED = "0123"  # of a block; see `cache.pool`, shared = owned by several
MOST_BLOCKS = 1 << 16  # of a map; a larger pool is told by its counts alone


class RowPicture(msgspec.Struct, frozen=True):
    """A live request (choice).

    Attributes:
        number: what step events call it.
        id, tenant: whose; never shown to another key.
        place: "waiting", "forking" or "running".
        prompt, generated, computed, cached: tokens.
        max_len: most tokens of prompt and answer.
        age: seconds since it arrived.
        preemptions: how often its blocks were taken back.
        blocks: per KV group, ids of the blocks it owns.
        left: how many of its first tokens the nearest prompt shares that was cached before it; None = none went on
            where its hit ended, or it waits.
    """

    number: int
    id: str
    tenant: str
    place: str
    prompt: int
    generated: int
    computed: int
    cached: int
    max_len: int
    age: float
    preemptions: int
    blocks: tuple[tuple[int, ...], ...]
    left: int | None = None


class PoolPicture(msgspec.Struct, frozen=True):
    """The blocks of one KV group.

    Attributes:
        size, used, cached: blocks.
        window: tokens that its layers look back on; None = all.
        states: one of `FREE`, `CACHED`, `OWNED`, `SHARED` per block; "" if there are too many.
    """

    size: int
    used: int
    cached: int
    window: int | None
    states: str


class Picture(msgspec.Struct, frozen=True):
    """The engine.

    Attributes:
        now: seconds of the engine's clock, as in its events.
        seconds: what it took to make this.
        blocked: why the first waiting request waits; "" if none does.
        block_size: tokens per block.
    """

    now: float
    seconds: float
    blocked: str
    block_size: int
    rows: tuple[RowPicture, ...]
    pools: tuple[PoolPicture, ...]


def picture(state: State, blocked: str, now: int) -> Picture:
    """Look at the engine, at `now` of its clock (ps)."""
    begin = time.perf_counter()
    cache = state.cache
    pools = tuple(_pool(pool, window) for pool, window in zip(cache.pools, cache.windows, strict=True))
    rows = tuple(_row(row, cache, now) for row in state.rows.values())
    return Picture(to_seconds(now), time.perf_counter() - begin, blocked, cache.block_size, rows, pools)


def _pool(pool: BlockPool, window: int | None) -> PoolPicture:
    states = ""
    if pool.size == len(pool.refs) <= MOST_BLOCKS:
        shown = [FREE if refs == 0 else OWNED if refs == 1 else SHARED for refs in pool.refs]
        for block in pool.cached:
            shown[block] = CACHED
        states = "".join(shown)
    return PoolPicture(pool.size, pool.size - pool.available, len(pool.cached), window, states)


def _row(row: Row, cache: KVCache, now: int) -> RowPicture:
    request, table = row.request, row.table
    owned = tuple(tuple(blocks[first:]) for blocks, first in zip(table.blocks, table.first, strict=True))
    left = None
    if row.place is not Place.WAITING and not row.uncached:
        left = left_at(cache, table, request.tokens, request.prompt_len, request.cached)
    return RowPicture(
        row.number, request.id, request.tenant, row.place.value, request.prompt_len, request.generated,
        request.computed, request.cached, request.max_len, to_seconds(now - request.arrival), request.preemptions,
        owned, left,
    )  # fmt: skip
