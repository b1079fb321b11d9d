"""Which blocks are known where, against a plain model of it; and names as the cache makes them."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from headway.cache.hashing import BlockHasher
from headway.cache.kv import KVCache
from headway.cache.table import BlockTable
from headway.core.step import Capabilities
from headway.routing.index import BlockIndex

MOST = 6
CHAINS = [[bytes([root, length]) for length in range(5)] for root in range(4)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("srqc"), st.integers(0, 2), st.integers(0, 3), st.integers(1, 5))))
def test_it_is_a_set_per_replica_that_forgets_the_oldest(ops: list[tuple[str, int, int, int]]) -> None:
    index, plain = BlockIndex(), [OrderedDict[bytes, None]() for _ in range(3)]
    for number in range(3):
        index.add(number, MOST)
    for what, number, root, length in ops:
        names, known = CHAINS[root][:length], plain[number]
        if what == "s":
            index.store(number, names)
            for name in reversed(names):
                known[name] = None
                known.move_to_end(name)
            while len(known) > MOST:
                known.popitem(last=False)
        elif what == "r":
            index.remove(number, names)
            for name in names:
                known.pop(name, None)
        elif what == "c":
            index.clear(number)
            known.clear()
        assert [index.count(one) for one in range(3)] == list(map(len, plain))
        expected = {
            one: next((at for at, name in enumerate(names) if name not in plain[one]), len(names)) for one in range(3)
        }
        assert index.runs(names, range(3)) == expected
        assert index.runs(names, [number]) == {number: expected[number]}


def test_prompts_are_cut_and_named_as_the_cache_does_it() -> None:
    limits = Capabilities(
        block_size=4, blocks=(8,), windows=(None,), max_rows=1, max_tokens_per_step=8, max_model_len=32
    )
    table = BlockTable(KVCache(limits, b"key"), "tenant", "adapter")
    hasher = BlockHasher(4, b"key")
    for length in range(1, 14):
        tokens = list(range(length))
        names = hasher.chain(hasher.root("tenant", "adapter"), tokens)
        assert names == table.name_blocks(tokens, (length - 1) // 4)
    assert hasher.chain(hasher.root("", ""), []) == []


def test_bytes_are_cut_too() -> None:
    hasher = BlockHasher(4, b"key")
    one, other = (hasher.chain_bytes(hasher.root("", ""), text, 3) for text in (b"abcdefgh", b"abcdeXgh"))
    assert len(one) == len(other) == 2 and one[0] == other[0] and one[1] != other[1]
