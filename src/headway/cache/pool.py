"""The blocks of one KV group. A block is in exactly one of three places:

    blank   nobody holds it and it remembers nothing
    cached  nobody holds it, but its content has a name (hash): a later prompt may revive it, a newcomer may take it
    owned   held by `refs` block tables

      take (blank first, else the least recently used cached)     release (last owner)
    blank, cached ------------------------------------> owned ------------------------> cached, or blank if unnamed
                  cached <---- share (a hit revives) ----^          cached --- expire ---> blank

Everything is O(1) per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from headway.core.events import PoolStart


class BlockPool:
    """Reference counts, names and recency of `size` blocks.

    Args:
        size: number of blocks; ids are 0 to size - 1.
        ttl: how long an unheld block keeps its name, ps; None = until it is taken.
        on_named, on_forgotten: called when a name starts and stops leading to a block.
        on_evicted: called with a block nobody holds, and the name it is about to lose. What it holds is still there.
    """

    def __init__(
        self,
        size: int,
        ttl: int | None = None,
        on_named: Callable[[bytes], None] | None = None,
        on_forgotten: Callable[[bytes], None] | None = None,
        on_evicted: Callable[[int, bytes], None] | None = None,
    ) -> None:
        self.size = size
        self.refs = [0] * size
        self.names: list[bytes | None] = [None] * size
        self.by_name: dict[bytes, int] = {}
        self.blank = list(range(size - 1, -1, -1))  # a stack: the block given back last is taken first
        self.cached: OrderedDict[int, int] = OrderedDict()  # block -> time of release, least recent first
        self._ttl = ttl
        self._on_named = on_named
        self._on_forgotten = on_forgotten
        self._on_evicted = on_evicted

    @property
    def available(self) -> int:
        """Blocks that can be taken now. The one answer for admission, growth, preemption and metrics."""
        return len(self.blank) + len(self.cached)

    def take(self) -> int:
        """A block with one owner and no name. IndexError if none is available: ask `available` first."""
        if self.blank:
            block = self.blank.pop()
        elif self.cached:
            block, _ = self.cached.popitem(last=False)
            self._forget(block)
        else:
            raise IndexError("no block is available")
        self.refs[block] = 1
        return block

    def take_many(self, count: int) -> tuple[int, ...]:
        """`count` such blocks."""
        return tuple([self.take() for _ in range(count)])

    def share(self, block: int) -> None:
        """One more owner for a block that is owned or cached."""
        if self.refs[block] == 0:
            del self.cached[block]
        self.refs[block] += 1

    def release(self, block: int, now: int) -> None:
        """One owner less. After the last one a named block becomes the most recently used cached one."""
        self.refs[block] -= 1
        if self.refs[block] == 0:
            if self.names[block] is None:
                self.blank.append(block)
            else:
                self.cached[block] = now

    def release_many(self, blocks: Iterable[int], now: int) -> None:
        """One owner less for each, in this order."""
        for block in blocks:
            self.release(block, now)

    def name(self, block: int, name: bytes) -> None:
        """Let `name` lead to this full, owned block. If it already leads to another block this one stays unnamed:
        tables are append-only, so a second copy is tolerated, never merged."""
        if name not in self.by_name:
            self.by_name[name] = block
            self.names[block] = name
            if self._on_named:
                self._on_named(name)

    def put(self, name: bytes, now: int) -> int:
        """A block for what `name` stands for, as the most recently used cached one. The name must lead to none yet, and
        a block be available."""
        block = self.take()
        self.name(block, name)
        self.release(block, now)
        return block

    def start(self) -> PoolStart:
        """What it holds now, while nobody owns a block."""
        assert self.available == self.size, "a pool is described while nobody owns a block"
        cached = tuple((block, self.names[block] or b"", released) for block, released in self.cached.items())
        return PoolStart(blank=tuple(self.blank), cached=cached)

    def restore(self, start: PoolStart) -> None:
        """Hold what another pool of this size held. Nothing may have been taken yet.

        Raises:
            ValueError: `start` does not list each block once.
        """
        if sorted([*start.blank, *(block for block, _, _ in start.cached)]) != list(range(self.size)):
            raise ValueError(f"a pool of {self.size} blocks starts with each of them once")
        self.blank = list(start.blank)
        for block, name, released in start.cached:
            self.name(block, name)
            self.cached[block] = released

    def expire(self, now: int) -> None:
        """Forget blocks released more than the time-to-live ago. O(1) when there is none."""
        if self._ttl is None:
            return
        while self.cached:
            block, released = next(iter(self.cached.items()))
            if released + self._ttl > now:
                return
            del self.cached[block]
            self._forget(block)
            self.blank.append(block)

    def _forget(self, block: int) -> None:
        name = self.names[block]
        assert name is not None, "a cached block has a name"
        if self._on_evicted:
            self._on_evicted(block, name)
        del self.by_name[name]
        self.names[block] = None
        if self._on_forgotten:
            self._on_forgotten(name)


class BlockCounter(BlockPool):
    """A pool that remembers nothing: blocks have no identity (all are number 0), no names and one owner each. For
    simulations without a prefix cache, where only how many there are can matter. O(1) for any number of blocks."""

    def __init__(self, size: int) -> None:
        super().__init__(0)
        self.size = size
        self._free = size

    @property
    def available(self) -> int:
        return self._free

    def take(self) -> int:
        return self.take_many(1)[0]

    def take_many(self, count: int) -> tuple[int, ...]:
        if count > self._free:
            raise IndexError("no block is available")
        self._free -= count
        return (0,) * count

    def share(self, block: int) -> None:
        raise NotImplementedError("counted blocks are not shared")

    def release(self, block: int, now: int) -> None:
        self._free += 1

    def release_many(self, blocks: Iterable[int], now: int) -> None:
        self._free += len(list(blocks))

    def name(self, block: int, name: bytes) -> None:
        raise NotImplementedError("counted blocks have no names")
