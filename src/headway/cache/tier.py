"""What a second tier of the prefix cache holds beside the blocks in memory, as bookkeeping: names, sizes, recency.

    pool -- a cached block is taken or expires ---> tier    (`KVCache.evicted`; the engine copies it in time)
    tier -- a prompt comes that goes on there ----> pool    (`scheduling.loading`; the engine copies it back, cached)

Where the bytes are, and how they get there, is the engine's affair. The least recently used go first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple, Protocol

SPEED = 200e6  # bytes per second that loading is taken to make before any was measured
RECENT = 8  # loads that the measured speed is a mean of


class TierKey(NamedTuple):
    """A block of one KV group. A group below 0: `name` is something else that takes room in the tier."""

    name: bytes
    group: int


class Holder(Protocol):
    """Who else may have a block: the tier, or another engine."""

    def __contains__(self, key: object) -> bool: ...

    def size(self, key: TierKey) -> int:
        """Bytes of a block that it has."""
        ...


class Tier:
    """The blocks of a tier of at most `limit` bytes.

    Attributes:
        blocks, bytes: held. Bytes may count what is no block.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.blocks = 0
        self.bytes = 0
        self._held: OrderedDict[TierKey, int] = OrderedDict()  # bytes, least recently used first
        self._speed = SPEED
        self._loads = 0

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def size(self, key: TierKey) -> int:
        """Bytes of a block that is held."""
        return self._held[key]

    def touch(self, key: TierKey) -> None:
        """A block that is held was used."""
        self._held.move_to_end(key)

    def put(self, key: TierKey, size: int) -> list[TierKey] | None:
        """Hold a block from now on -> those that make room for it; None if there can never be enough."""
        if size > self.limit:
            return None
        self.drop(key)
        gone = []
        while self.bytes + size > self.limit:
            gone.append(next(iter(self._held)))
            self.drop(gone[-1])
        self._held[key] = size
        self.bytes += size
        self.blocks += key.group >= 0
        return gone

    def drop(self, key: TierKey) -> None:
        """Hold it no more. Idempotent."""
        if key in self._held:
            self.bytes -= self._held.pop(key)
            self.blocks -= key.group >= 0

    def seconds(self, size: int) -> float:
        """How long loading so many bytes takes, as measured."""
        return size / self._speed

    def measured(self, size: int, seconds: float) -> None:
        """So many bytes were loaded."""
        if size and seconds > 0:
            self._loads += 1
            share = 1 / min(self._loads, RECENT)
            self._speed = 1 / ((1 - share) / self._speed + share * seconds / size)


class Reach:
    """A prefix that memory and another holder have together.

    Attributes:
        length: blocks of the sequence. loads: (group, index of a block) that only the other has, the first ones first.
        bytes: of these.
    """

    __slots__ = ("bytes", "length", "loads")

    def __init__(self, length: int, loads: list[tuple[int, int]], size: int) -> None:
        self.length = length
        self.loads = loads
        self.bytes = size
