"""Requests whose prompts go on elsewhere, in the cache's second tier or in another engine, and the blocks that come.

    add --consider--> LOADING --load ... load, the last one--> WAITING        nothing is read here: the engine does that

This is the scheduler's half of a KV connector: which blocks of a newcomer's prompt are to come (`BlockSource`). The
other half has the bytes (`engine.connector`). It brings them between two steps, and what it brings is cached as if it
had been computed: plans know of no connector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from headway.cache.kv import KVCache
from headway.cache.tier import Reach, TierKey
from headway.core.events import BlocksAwaited, BlocksLoaded, EventLog
from headway.scheduling.forecast import Forecast
from headway.scheduling.row import Row
from headway.scheduling.state import State


class BlockSource(Protocol):
    """Where blocks of a prompt may come from. Changes nothing, and may be asked again."""

    def reach(self, cache: KVCache, names: Sequence[bytes]) -> Reach:
        """The prefix of a prompt, by the names of its blocks, that is there together with what the cache holds."""
        ...

    def worthwhile(self, reach: Reach, computing: float) -> bool:
        """Whether to wait for it rather than compute it, which takes so many seconds; 0 = nobody knows."""
        ...


class TierSource:
    """The cache's second tier: what it holds, if reading that is quicker than computing it."""

    def __init__(self, cache: KVCache) -> None:
        self._tier = cache.tier

    def reach(self, cache: KVCache, names: Sequence[bytes]) -> Reach:
        return cache.reach(names)

    def worthwhile(self, reach: Reach, computing: float) -> bool:
        return not computing or (self._tier is not None and self._tier.seconds(reach.bytes) < computing)


class RemoteSource:
    """Another engine, which computes this very prompt: all that it needs. Somebody has weighed it already: whoever sent
    the request to both."""

    def reach(self, cache: KVCache, names: Sequence[bytes]) -> Reach:
        return cache.reach(names, _Everything())

    def worthwhile(self, reach: Reach, computing: float) -> bool:
        return True


class _Everything:
    def __contains__(self, key: object) -> bool:
        return True

    def size(self, key: TierKey) -> int:
        return 0


class LoadingDesk:
    """Who waits for which blocks."""

    def __init__(self, state: State, log: EventLog | None) -> None:
        self._state = state
        self._log = log
        self._tier, self._remote = TierSource(state.cache), RemoteSource()

    def consider(self, row: Row, forecast: Callable[[], Forecast]) -> None:
        """Let a row that was just added wait for blocks from elsewhere, if that is worthwhile."""
        cache, tokens, remote = self._state.cache, row.request.tokens, row.request.remote
        if row.uncached or not cache.reuse or (cache.tier is None and not remote):
            return
        source: BlockSource = self._remote if remote else self._tier
        names = row.table.name_blocks(tokens, (len(tokens) - 1) // cache.block_size)
        reach = source.reach(cache, names)
        saved = (reach.length - cache.lookup(names, tokens).length) * cache.block_size
        if saved > 0 and source.worthwhile(reach, forecast().by_model(saved, decodes=False)):
            now, id = row.request.arrival, row.request.id
            self.wait(BlocksAwaited(now=now, id=id, blocks=tuple(reach.loads), remote=remote))

    def wait(self, event: BlocksAwaited) -> None:
        """A request that was just added waits for these blocks."""
        row = self._state.rows[event.id]
        self._state.await_load(row, event.blocks, event.now)
        if self._log:
            self._log.append(event)

    def next(self) -> tuple[str, list[tuple[int, int, bytes]]] | None:
        """The id of the request that has waited longest for the tier, and which of its blocks are not in memory by now:
        (group, index, name) each. Whoever can read them calls `load`, until it was the last time."""
        for id, (row, _) in self._state.loads.items():
            if not row.request.remote:
                return id, self.missing(id)
        return None

    def missing(self, id: str) -> list[tuple[int, int, bytes]]:
        """Blocks that a waiting request waits for and that are not in memory by now; none if it does not wait."""
        if id not in self._state.loads:
            return []
        row, loads = self._state.loads[id]
        named = [(group, index, row.table.names[index]) for group, index in loads]
        return [one for one in named if one[2] not in self._state.cache.pools[one[0]].by_name]

    def waits(self, id: str) -> bool:
        """Whether a request waits for blocks."""
        return id in self._state.loads

    def load(self, event: BlocksLoaded) -> tuple[int, ...]:
        """Blocks of a waiting request are here -> where to write them, before the next step. There must be room for
        them, and what `cache.evicted` names is to be saved before. After the last ones the request is in the queue."""
        row, _ = self._state.loads[event.id]
        tokens = row.request.tokens
        blocks = tuple([row.table.load(tokens, group, index, event.now) for group, index in event.blocks])
        if event.last:
            self._state.loaded(row, event.now)
        if self._log:
            self._log.append(event)
        return blocks
