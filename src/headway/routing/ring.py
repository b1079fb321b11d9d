"""A consistent hash ring (Karger 1997): of n replicas, one that comes or goes moves about 1/n of the keys.

Each replica stands at `POINTS` places of a circle of 64-bit numbers; a key belongs to the next one after its own place.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator
from hashlib import blake2b

POINTS = 96  # places of a replica: shares of keys differ by about a tenth


class HashRing:
    """The circle over some names."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self._ring = sorted((_place(f"{name}#{point}"), name) for name in self.names for point in range(POINTS))
        self._places = [place for place, _ in self._ring]

    def walk(self, key: str) -> Iterator[str]:
        """All names, beginning with the one that `key` belongs to: who is asked in its place, and so on."""
        start = bisect(self._places, _place(key))
        seen: set[str] = set()
        for step in range(len(self._ring)):
            name = self._ring[(start + step) % len(self._ring)][1]
            if name not in seen:
                seen.add(name)
                yield name


def _place(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "big")
