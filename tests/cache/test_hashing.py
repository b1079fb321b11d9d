"""Names of blocks: chained, keyed, rooted in tenant and adapter."""

from __future__ import annotations

from headway.cache.hashing import NAME_BYTES, BlockHasher, agreeing


def test_a_name_depends_on_tokens_parent_and_key() -> None:
    hasher = BlockHasher(2, b"key")
    root = hasher.root("", "")
    one = hasher.name(root, hasher.pack([1, 2]))
    names = {
        one,
        hasher.name(root, hasher.pack([2, 1])),
        hasher.name(one, hasher.pack([1, 2])),
        BlockHasher(2, b"other").name(root, hasher.pack([1, 2])),
        hasher.name(hasher.root("tenant", ""), hasher.pack([1, 2])),
        hasher.name(hasher.root("", "tenant"), hasher.pack([1, 2])),
    }
    assert len(names) == 6 and all(len(name) == NAME_BYTES == 16 for name in names)
    assert one == BlockHasher(2, b"key").name(root, hasher.pack([1, 2]))


def test_tenant_and_adapter_cannot_be_confused() -> None:
    hasher = BlockHasher(2, b"key")
    assert hasher.root("ab", "c") != hasher.root("a", "bc")


def test_packed_tokens_come_back_and_may_be_any_64_bit_number() -> None:
    hasher = BlockHasher(3, b"")
    tokens = (0, 2**63 - 1, -(2**63))
    assert hasher.unpack(hasher.pack(tokens)) == tokens
    assert len(hasher.pack(tokens)) == 24


def test_chains_agree_up_to_the_first_block_that_differs() -> None:
    chain = [bytes([number]) for number in range(7)]
    for length in range(8):
        for common in range(length + 1):
            other = [*chain[:common], *(bytes([100 + number]) for number in range(common, length))]
            assert agreeing(chain, other) == agreeing(other, chain) == common
