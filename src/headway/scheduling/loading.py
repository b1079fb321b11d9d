"""Requests whose prompts go on in the cache's second tier, and the blocks that come back for them.

    add --consider--> LOADING --load ... load, the last one--> WAITING        nothing is read here: the engine does that

It reads between two steps, and what it brings is cached as if it had been computed: plans know of no tier.
"""

from __future__ import annotations

from collections.abc import Callable

from headway.core.events import BlocksAwaited, BlocksLoaded, EventLog
from headway.scheduling.forecast import Forecast
from headway.scheduling.row import Row
from headway.scheduling.state import State


class LoadingDesk:
    """Who waits for which blocks."""

    def __init__(self, state: State, log: EventLog | None) -> None:
        self._state = state
        self._log = log

    def consider(self, row: Row, forecast: Callable[[], Forecast]) -> None:
        """Let a row that was just added wait for blocks of the tier, if loading them takes less time than computing."""
        cache, tier, tokens = self._state.cache, self._state.cache.tier, row.request.tokens
        if tier is None or row.uncached:
            return
        names = row.table.name_blocks(tokens, (len(tokens) - 1) // cache.block_size)
        reach = cache.reach(names)
        saved = (reach.length - cache.lookup(names, tokens).length) * cache.block_size
        if saved <= 0:
            return
        computing = forecast().by_model(saved, decodes=False)
        if not computing or tier.seconds(reach.bytes) < computing:  # 0: nothing is known
            self.wait(BlocksAwaited(now=row.request.arrival, id=row.request.id, blocks=tuple(reach.loads)))

    def wait(self, event: BlocksAwaited) -> None:
        """A request that was just added waits for these blocks."""
        row = self._state.rows[event.id]
        self._state.await_load(row, event.blocks, event.now)
        if self._log:
            self._log.append(event)

    def next(self) -> tuple[str, list[tuple[int, int, bytes]]] | None:
        """The id of the request that has waited longest, and which of its blocks are not in memory by now: (group,
        index, name) each. Whoever can read them calls `load`, until it was the last time."""
        for id, (row, loads) in self._state.loads.items():
            named = [(group, index, row.table.names[index]) for group, index in loads]
            return id, [one for one in named if one[2] not in self._state.cache.pools[one[0]].by_name]
        return None

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
