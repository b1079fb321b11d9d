"""The cache over all KV groups: one pool each, one chain of names for all, and the longest reusable prefix of a prompt.

Every group cuts a sequence at the same places (block j holds positions [j*block_size, (j+1)*block_size)), so one name
per position serves all of them; a pool maps the name to its own block id.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial

from headway.cache.hashing import BlockHasher
from headway.cache.pool import BlockCounter, BlockPool
from headway.cache.tier import Holder, Reach, Tier, TierKey
from headway.core.step import Capabilities, blocks_held


class Hit:
    """A cached prefix: `length` blocks long, with the block of each group to share.

    Attributes:
        length: blocks of the sequence that need no computing.
        first: per group, index of the first block needed; 0 but for window groups.
        blocks: per group, `length` block ids; -1 before `first`.
    """

    __slots__ = ("blocks", "first", "length")

    def __init__(self, length: int, first: list[int], blocks: tuple[list[int], ...]) -> None:
        self.length = length
        self.first = first
        self.blocks = blocks


class Known:
    """A named block: what it follows, what it holds, and in how many pools it lives."""

    __slots__ = ("parent", "payload", "pools")

    def __init__(self, parent: bytes, payload: bytes) -> None:
        self.parent = parent
        self.payload = payload
        self.pools = 0


class KVCache:
    """Pools, names and lookup.

    Args:
        limits: block size, pool sizes, windows and the largest step.
        key: secret of the block names.
        ttl: time-to-live of a block nobody holds, ps; None = until its place is needed.
        verify: compare tokens on every hit (debug); the 128-bit keyed name is trusted otherwise.
        reuse: name blocks and keep them; otherwise they are only counted.
        tier: where blocks go that are evicted; None = nowhere.

    Attributes:
        evicted: (group, block, name) of blocks that lost their names while there is a tier. Whoever keeps their content
            there takes them before the next step overwrites it.
    """

    def __init__(
        self,
        limits: Capabilities,
        key: bytes,
        ttl: int | None = None,
        verify: bool = False,
        reuse: bool = True,
        tier: Tier | None = None,
    ) -> None:
        self.reuse = reuse
        self.block_size = limits.block_size
        self.windows = limits.windows
        self.long_after = limits.long_after
        self.windowed = any(window is not None for window in limits.windows)
        self.hasher = BlockHasher(limits.block_size, key)
        self.pools: tuple[BlockPool, ...] = tuple(
            BlockPool(size, ttl, self._count, self._uncount, partial(self._evict, group) if tier is not None else None)
            if reuse
            else BlockCounter(size)
            for group, size in enumerate(limits.blocks)
        )
        self.tier = tier
        self.evicted: list[tuple[int, int, bytes]] = []
        self.known: dict[bytes, Known] = {}
        self.children: dict[bytes, dict[bytes, None]] = {}  # parent -> names, in order of first appearance
        self._most_new = limits.max_tokens_per_step * limits.max_in_flight  # planned, and not yet trimmed behind
        self._verify = verify

    def is_long(self, tokens: int) -> bool:
        """Whether a row that knows so many tokens is computed with the positions of long ones."""
        return self.long_after is not None and tokens > self.long_after

    def first_needed(self, group: int, position: int) -> int:
        """Index of the first block that a query at `position` looks at."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def holding(self, group: int, tokens: int) -> int:
        """The most blocks a row of `tokens` computed tokens ever holds at once."""
        return blocks_held(tokens, self.windows[group], self.block_size, self._most_new)

    def expire(self, now: int) -> None:
        for pool in self.pools:
            pool.expire(now)

    def lookup(self, names: Sequence[bytes], tokens: Sequence[int]) -> Hit:
        """The longest prefix of the chain `names` (of the blocks of `tokens`) that every group still holds.

        A window group needs only the blocks that the first computed token looks back on; the hit shrinks until
        those are there. Takes nothing: `BlockTable.adopt` does.
        """
        if not names:
            return Hit(0, [0] * len(self.pools), tuple([[] for _ in self.pools]))
        length = self._longest(names, [pool.by_name for pool in self.pools])
        if self._verify:
            self._compare(names[:length], tokens)
        first = [self.first_needed(group, length * self.block_size) for group in range(len(self.pools))]
        blocks = [
            [-1] * start + [pool.by_name[name] for name in names[start:length]]
            for start, pool in zip(first, self.pools, strict=True)
        ]
        return Hit(length, first, tuple(blocks))

    def reach(self, names: Sequence[bytes], other: Holder | None = None) -> Reach:
        """The longest prefix that memory and another holder of blocks have together, and memory has room for. Takes
        nothing. other: None = the tier, if there is one."""
        other = self.tier if other is None else other
        if other is None:
            return Reach(0, [], 0)
        homes = [_Either(pool.by_name, other, group) for group, pool in enumerate(self.pools)]
        room = min(
            (_room(pool, names) for pool, window in zip(self.pools, self.windows, strict=True) if window is None),
            default=len(names),
        )
        length = self._longest(names[:room], homes)
        first = [self.first_needed(group, length * self.block_size) for group in range(len(self.pools))]
        if any(length - f > _room(pool, names[f:length]) for f, pool in zip(first, self.pools, strict=True)):
            return Reach(0, [], 0)
        loads = [
            (group, index)
            for index in range(length)
            for group, pool in enumerate(self.pools)
            if index >= first[group] and names[index] not in pool.by_name
        ]
        return Reach(length, loads, sum(other.size(TierKey(names[index], group)) for group, index in loads))

    def _longest(self, names: Sequence[bytes], homes: Sequence[Container[bytes]]) -> int:
        """Length of the longest prefix whose needed blocks are all in the home of their group."""
        length = len(names)
        for home, window in zip(homes, self.windows, strict=True):
            if window is None:
                length = next((i for i in range(length) if names[i] not in home), length)
        return self._shrink_to_windows(names[:length], homes) if self.windowed else length

    def _shrink_to_windows(self, names: Sequence[bytes], homes: Sequence[Container[bytes]]) -> int:
        """The largest length such that every window group holds an unbroken run of blocks back to what is needed."""
        windowed = [group for group, window in enumerate(self.windows) if window is not None]
        run = dict.fromkeys(windowed, 0)
        best = 0
        for index, name in enumerate(names):
            for group in windowed:
                run[group] = run[group] + 1 if name in homes[group] else 0
            length = index + 1
            if all(run[g] >= length - self.first_needed(g, length * self.block_size) for g in windowed):
                best = length
        return best

    def _compare(self, names: Sequence[bytes], tokens: Sequence[int]) -> None:
        for index, name in enumerate(names):
            known = self.known.get(name)  # None behind a window, where nothing is shared either
            part = tokens[index * self.block_size : (index + 1) * self.block_size]
            if known is not None and known.payload != self.hasher.pack(part):
                raise AssertionError(f"block {index}: same name, other tokens")

    def remember(self, name: bytes, parent: bytes, payload: bytes) -> None:
        """Note what a name stands for, before a pool first uses it."""
        if name not in self.known:
            self.known[name] = Known(parent, payload)
            self.children.setdefault(parent, {})[name] = None

    def refresh(self, names: Sequence[bytes], now: int) -> None:
        """A prefix is about to be used: those of its blocks that nobody owns become the most recently used, its end
        before its start."""
        for name in reversed(names):
            for pool in self.pools:
                block = pool.by_name.get(name)
                if block is not None:
                    pool.share(block)
                    pool.release(block, max(now, next(reversed(pool.cached.values()), now)))

    def _evict(self, group: int, block: int, name: bytes) -> None:
        self.evicted.append((group, block, name))

    def _count(self, name: bytes) -> None:
        self.known[name].pools += 1

    def _uncount(self, name: bytes) -> None:
        known = self.known[name]
        known.pools -= 1
        if known.pools == 0:
            del self.known[name]
            siblings = self.children[known.parent]
            del siblings[name]
            if not siblings:
                del self.children[known.parent]


class _Either:
    """The names of a group that lead to a block in memory or at another holder."""

    __slots__ = ("_by_name", "_group", "_other")

    def __init__(self, by_name: dict[bytes, int], other: Holder, group: int) -> None:
        self._by_name, self._other, self._group = by_name, other, group

    def __contains__(self, name: object) -> bool:
        return name in self._by_name or (name, self._group) in self._other


def _room(pool: BlockPool, names: Sequence[bytes]) -> int:
    """How many of these blocks a pool could hold at once: those that are owned have their place."""
    return pool.available + sum(pool.refs[pool.by_name[name]] > 0 for name in names if name in pool.by_name)
