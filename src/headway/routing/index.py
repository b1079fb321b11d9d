"""Which blocks are known at which replica: one look-up per block answers for all replicas at once.

    name of a block -> bits of the replicas that hold it        and of each replica its names, least recently used first

What is known comes from the router's own memory of what it sent where, bounded by what a replica's cache holds and
forgotten in the order in which a cache would; or exactly, from a replica that publishes what it stores and gives up.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

USUAL_BLOCKS = 1 << 16  # of a replica whose cache is of unknown size


class BlockIndex:
    """Names of cached blocks by replica; replicas are numbered from 0."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._known: dict[int, OrderedDict[bytes, None]] = {}
        self._most: dict[int, int] = {}

    def add(self, number: int, most: int = USUAL_BLOCKS) -> None:
        """A replica of which at most `most` blocks are remembered."""
        self._known.setdefault(number, OrderedDict())
        self._most[number] = most
        self._shrink(number)

    def count(self, number: int) -> int:
        """Blocks known of a replica."""
        return len(self._known[number])

    def runs(self, names: Sequence[bytes], numbers: Iterable[int]) -> dict[int, int]:
        """How many blocks from the start each of some replicas holds."""
        wanted = mask = sum(1 << number for number in numbers)
        found = dict.fromkeys(_bits(wanted), 0)
        holders = self._holders
        for length, name in enumerate(names):
            still = mask & holders.get(name, 0)
            if still != mask:
                for number in _bits(mask & ~still):
                    found[number] = length
                mask = still
                if not mask:
                    return found
        for number in _bits(mask):
            found[number] = len(names)
        return found

    def store(self, number: int, names: Sequence[bytes]) -> None:
        """A replica has these blocks of one prompt, in this order. The start of a prompt outlives its end."""
        known, bit, holders = self._known[number], 1 << number, self._holders
        for name in reversed(names):
            if name in known:
                known.move_to_end(name)
            else:
                known[name] = None
                holders[name] = holders.get(name, 0) | bit
        self._shrink(number)

    def remove(self, number: int, names: Iterable[bytes]) -> None:
        """A replica has given these up. Unknown ones do not matter."""
        known = self._known[number]
        for name in names:
            if name in known:
                del known[name]
                self._let_go(number, name)

    def clear(self, number: int) -> None:
        """A replica's cache is empty: it has started anew."""
        for name in self._known[number]:
            self._let_go(number, name)
        self._known[number].clear()

    def _shrink(self, number: int) -> None:
        known = self._known[number]
        for _ in range(len(known) - self._most[number]):
            name, _none = known.popitem(last=False)
            self._let_go(number, name)

    def _let_go(self, number: int, name: bytes) -> None:
        left = self._holders[name] & ~(1 << number)
        if left:
            self._holders[name] = left
        else:
            del self._holders[name]


def _bits(mask: int) -> Iterable[int]:
    """Numbers of the bits that are set."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
