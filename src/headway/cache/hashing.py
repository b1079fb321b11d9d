"""Names of full blocks: a 128-bit keyed hash chained over (parent, tokens), rooted in (namespace, adapter).

A name stands for a whole prefix, so equal names mean equal keys and values at equal positions. The key keeps a
client from forging or probing collisions, and names from being compared across installations.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b

NAME_BYTES = 16


class BlockHasher:
    """Names blocks of `block_size` tokens under one secret `key` (at most 64 bytes)."""

    def __init__(self, block_size: int, key: bytes) -> None:
        self.block_size = block_size
        self._key = key
        self._begun = blake2b(digest_size=NAME_BYTES, key=key, person=b"headway-block")  # copied: a third less time
        self._packer = struct.Struct(f"<{block_size}q")  # little-endian everywhere: names may travel

    def root(self, namespace: str, adapter: str, long: bool = False) -> bytes:
        """Parent of first blocks. Tenants and adapters never share blocks, because their roots differ; nor do long rows
        of a model that computes those with other positions."""
        salt = namespace.encode()
        payload = len(salt).to_bytes(8, "little") + salt + adapter.encode()
        return blake2b(
            payload, digest_size=NAME_BYTES, key=self._key, person=b"headway-long" if long else b"headway-root"
        ).digest()

    def pack(self, tokens: Sequence[int]) -> bytes:
        """One block of token ids as bytes."""
        return self._packer.pack(*tokens)

    def unpack(self, payload: bytes) -> tuple[int, ...]:
        return self._packer.unpack(payload)

    def name(self, parent: bytes, payload: bytes) -> bytes:
        """Name of the block `payload` that follows `parent`."""
        hash = self._begun.copy()
        hash.update(parent)
        hash.update(payload)
        return hash.digest()

    def chain(self, root: bytes, tokens: Sequence[int]) -> list[bytes]:
        """Names of the blocks of a prompt that a lookup may find: all full ones before its last token."""
        count = max(0, len(tokens) - 1) // self.block_size
        whole = struct.pack(f"<{count * self.block_size}q", *tokens[: count * self.block_size])
        return self.chain_bytes(root, whole, 8 * self.block_size)

    def chain_bytes(self, root: bytes, payload: bytes, size: int) -> list[bytes]:
        """Names of the full pieces of `size` bytes."""
        names, parent = [], root
        for start in range(0, len(payload) - size + 1, size):
            parent = self.name(parent, payload[start : start + size])
            names.append(parent)
        return names


def agreeing(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many blocks two chains of names have in common from the start. By bisection: a name stands for all before."""
    fits, too_many = 0, min(len(one), len(other)) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if one[middle - 1] == other[middle - 1]:
            fits = middle
        else:
            too_many = middle
    return fits
