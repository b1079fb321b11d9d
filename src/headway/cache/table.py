"""The block table of one request: the only owner of cache blocks.

positions   0 ........... trimmed ........... sealed ......... computed ....... capacity
            | given back    | full, named,     | full or not    | allocated,     |
            | (window       | immutable,       | yet named,     | to be written  |
            |  groups), -1  | may be shared    | ours alone     | by this step   |

pool  -- grow -->  table       blank blocks to write into
pool  -- adopt --> table       a prefix hit: shared blocks, read only
table -- fork -->  table       the same between two choices of one prompt; the part-filled block is copied
tier  -- load -->  pool        a block of the prefix comes back; nobody owns it yet
table -- seal -->  table+pool  a full block gets its name; the table still owns it
table -- trim -->  pool        blocks behind the window
table -- release-> pool        everything; idempotent. Finish, cancel, preempt, failure: all are this.
"""

from __future__ import annotations

from collections.abc import Sequence

from headway.cache.kv import Hit, KVCache
from headway.core.step import BlockCopy, BlockIds


class BlockTable:
    """Blocks of one request in every KV group, and the names of its full blocks.

    Attributes:
        root: what its first block follows; differs by namespace and adapter, and of long rows.
        long: it is one, see `Capabilities.long_after`.
        blocks: per group, block ids by index (position // block_size); -1 = trimmed.
        first: per group, index of the first block held.
        sealed: full blocks from the start whose names have been offered to the pools.
        capacity: positions that have a block (or had one, behind a window).
        names: chain of names of the request's full blocks, as far as needed yet; outlives `release`, because
            tokens are append-only.
    """

    __slots__ = ("_cache", "_owner", "blocks", "capacity", "first", "long", "names", "root", "sealed")

    def __init__(self, cache: KVCache, namespace: str = "", adapter: str = "", tokens: int = 0) -> None:
        self._cache = cache
        self._owner = namespace, adapter
        self._clear()
        self._begin(cache.is_long(tokens))

    def _begin(self, long: bool) -> None:
        self.long = long
        self.root = self._cache.hasher.root(*self._owner, long)
        self.names: list[bytes] = []

    def begin_again(self, tokens: int) -> None:
        """The row will be computed anew, and knows so many tokens now. The table must be empty."""
        if self._cache.is_long(tokens) != self.long:
            self._begin(not self.long)

    def _clear(self) -> None:
        self.blocks: tuple[list[int], ...] = tuple([] for _ in self._cache.pools)
        self.first = [0] * len(self._cache.pools)
        self.sealed = 0
        self.capacity = 0

    def held(self, group: int) -> int:
        """Blocks owned in a group."""
        return len(self.blocks[group]) - self.first[group]

    def ids(self) -> BlockIds:
        """The whole table, `[group][block]`."""
        return tuple(tuple(blocks) for blocks in self.blocks)

    def room(self, keep: int = 0) -> int:
        """Positions the row could have blocks for, if it took every available one but `keep` per pool."""
        pools = zip(self.blocks, self._cache.pools, strict=True)
        return self._cache.block_size * min(len(blocks) + max(0, pool.available - keep) for blocks, pool in pools)

    def grow(self, end: int) -> BlockIds | None:
        """Get blocks for positions below `end` in every group, or in none.

        Returns the new blocks, `[group][block]`; () if there is nothing to get; None if a pool has not enough.
        """
        missing = -(-(end - self.capacity) // self._cache.block_size)
        if missing <= 0:
            return ()
        pools = self._cache.pools
        for pool in pools:
            if pool.available < missing:
                return None
        new = tuple([pool.take_many(missing) for pool in pools])
        for blocks, fresh in zip(self.blocks, new, strict=True):
            blocks.extend(fresh)
        self.capacity += missing * self._cache.block_size
        return new

    def name_blocks(self, tokens: Sequence[int], count: int) -> list[bytes]:
        """Names of the first `count` full blocks of `tokens`. Each is computed once. None where nothing is reused."""
        if not self._cache.reuse:
            return []
        self._extend_names(tokens, count)
        return self.names[:count]

    def _extend_names(self, tokens: Sequence[int], count: int) -> None:
        for index in range(len(self.names), count):
            self._name(index, self._payload(tokens, index))

    def _payload(self, tokens: Sequence[int], index: int) -> bytes:
        size = self._cache.block_size
        return self._cache.hasher.pack(tokens[index * size : (index + 1) * size])

    def _name(self, index: int, payload: bytes) -> tuple[bytes, bytes]:
        """Name of block `index`, the last one or one named before, and of the block it follows."""
        parent = self.names[index - 1] if index else self.root
        if index == len(self.names):
            self.names.append(self._cache.hasher.name(parent, payload))
        return self.names[index], parent

    def lookup(self, tokens: Sequence[int]) -> Hit:
        """The reusable prefix, capped below the last token: that one is always computed, to have its logits."""
        return self._cache.lookup(self.name_blocks(tokens, (len(tokens) - 1) // self._cache.block_size), tokens)

    def load(self, tokens: Sequence[int], group: int, index: int, now: int) -> int:
        """A cached block for full block `index`, whose content somebody is about to write -> the block."""
        payload = self._payload(tokens, index)
        self._extend_names(tokens, index)
        name, parent = self._name(index, payload)
        self._cache.remember(name, parent, payload)
        return self._cache.pools[group].put(name, now)

    def adopt(self, hit: Hit) -> None:
        """Share the blocks of a hit. The table must be empty."""
        assert self.capacity == 0, "only an empty table can adopt a prefix"
        for group, (pool, shared) in enumerate(zip(self._cache.pools, hit.blocks, strict=True)):
            self.first[group] = hit.first[group]
            for block in shared[hit.first[group] :]:
                pool.share(block)
            self.blocks[group].extend(shared)
        self.sealed = hit.length
        self.capacity = hit.length * self._cache.block_size

    def forkable(self, position: int) -> Hit | None:
        """The full blocks before `position`, for another choice that will compute from there; None if they are
        not all here (not computed yet, or behind the window by now)."""
        length = position // self._cache.block_size
        if position > self.capacity or length > self.sealed:
            return None
        first = [self._cache.first_needed(group, position) for group in range(len(self.blocks))]
        if any(needed < held for needed, held in zip(first, self.first, strict=True)):
            return None
        return Hit(length, first, tuple([-1] * f + own[f:length] for f, own in zip(first, self.blocks, strict=True)))

    def copy_partial(self, source: BlockTable, position: int) -> tuple[BlockCopy, ...]:
        """Own a copy of the block `position` lies in, because it will be written: copy on write, the write being
        immediate. Nothing to copy if `position` starts a block. Call after `adopt(source.forkable(position))`."""
        index, offset = divmod(position, self._cache.block_size)
        if offset == 0:
            return ()
        new = self.grow(position + 1)
        assert new, "admission made sure that the copied block fits"
        return tuple(BlockCopy(group, source.blocks[group][index], new[group][0]) for group in range(len(new)))

    def seal(self, tokens: Sequence[int], computed: int) -> None:
        """Name the full blocks among the first `computed` tokens; from now on they are immutable and can be hit.
        Call before `trim`, so that every block to name is still here."""
        cache = self._cache
        full = computed // cache.block_size
        if full <= self.sealed:
            return
        if not cache.reuse:
            self.sealed = full
            return
        self._extend_names(tokens, self.sealed)  # a forked table shares blocks that it never had to name
        for index in range(self.sealed, full):
            payload = self._payload(tokens, index)
            name, parent = self._name(index, payload)
            cache.remember(name, parent, payload)
            for blocks, pool in zip(self.blocks, cache.pools, strict=True):
                pool.name(blocks[index], name)
        self.sealed = full

    def trim(self, computed: int, now: int) -> None:
        """Give back the blocks that no query at `computed` or later looks at."""
        for group, pool in enumerate(self._cache.pools):
            first = self._cache.first_needed(group, computed)
            for index in range(self.first[group], first):
                pool.release(self.blocks[group][index], now)
                self.blocks[group][index] = -1
            self.first[group] = max(first, self.first[group])

    def release(self, now: int) -> None:
        """Give everything back, the end first, so that the start of a prefix is evicted last. Idempotent."""
        for group, pool in enumerate(self._cache.pools):
            pool.release_many(reversed(self.blocks[group][self.first[group] :]), now)
        self._clear()
