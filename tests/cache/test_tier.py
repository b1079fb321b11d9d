"""The second tier's books, against a dict in order of use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.cache.kv import KVCache
from headway.cache.table import BlockTable
from headway.cache.tier import Tier, TierKey
from headway.core.step import Capabilities

keys = st.builds(TierKey, st.sampled_from([b"a", b"b", b"c", b"d"]), st.integers(-1, 1))
deeds = st.lists(st.tuples(st.sampled_from(["put", "touch", "drop"]), keys, st.integers(1, 12)), max_size=40)


@given(deeds)
def test_the_least_recently_used_go_first_and_the_bound_holds(deeds: list[tuple[str, TierKey, int]]) -> None:
    tier, model = Tier(20), dict[TierKey, int]()
    for what, key, size in deeds:
        if what == "put":
            model.pop(key, None)
            gone = []
            while sum(model.values()) + size > 20:
                gone.append(next(iter(model)))
                del model[gone[-1]]
            model[key] = size
            assert tier.put(key, size) == gone
        elif what == "touch" and key in model:
            model[key] = model.pop(key)
            tier.touch(key)
        elif what == "drop":
            model.pop(key, None)
            tier.drop(key)
        assert all((key in tier) == (key in model) for key in [*model, key])
        assert all(tier.size(key) == size for key, size in model.items())
        assert (tier.bytes, tier.blocks) == (sum(model.values()), sum(key.group >= 0 for key in model))


def test_what_can_never_fit_displaces_nothing() -> None:
    tier = Tier(10)
    tier.put(TierKey(b"a", 0), 10)
    assert tier.put(TierKey(b"b", 0), 11) is None and TierKey(b"a", 0) in tier


def test_speed_is_what_recent_loads_had() -> None:
    tier = Tier(1)
    for _ in range(40):
        tier.measured(1000, 0.5)
    assert tier.seconds(2000) == pytest.approx(1.0)
    for _ in range(40):
        tier.measured(1000, 0.25)
    assert tier.seconds(2000) == pytest.approx(0.5, rel=0.01)
    tier.measured(0, 0.0)  # nothing read says nothing
    assert tier.seconds(2000) == pytest.approx(0.5, rel=0.01)


# blocks of 4 tokens; a window of 5 looks back over at most 2 blocks behind the one that is computed
REACHES = [  # (windows, in memory per group, on disk per group, pool, (length, loads))
    ([None], ["ab"], ["cd"], 9, (4, [(0, 2), (0, 3)])),
    ([None], [""], ["abcd"], 9, (4, [(0, 0), (0, 1), (0, 2), (0, 3)])),
    ([None], ["b"], ["ad"], 9, (2, [(0, 0)])),  # a gap in the middle is filled, one further on ends the prefix
    ([None], ["a"], ["bcd"], 3, (3, [(0, 1), (0, 2)])),  # as much as memory has room for
    ([None, 5], ["abcd", ""], ["", "cd"], 9, (4, [(1, 3)])),  # behind the window nothing is needed
    ([None, 5], ["ab", "ab"], ["cd", "d"], 9, (4, [(0, 2), (0, 3), (1, 3)])),
    ([None, 5], ["abcd", "b"], ["", ""], 9, (2, [])),
]


@pytest.mark.parametrize(("windows", "memory", "disk", "pool", "expected"), REACHES)
def test_a_prefix_is_put_together_from_memory_and_tier(windows, memory, disk, pool, expected) -> None:
    groups = len(windows)
    limits = Capabilities(
        block_size=4,
        blocks=(pool,) * groups,
        windows=tuple(windows),
        max_rows=1,
        max_tokens_per_step=16,
        max_model_len=64,
    )
    tier = Tier(1000)
    cache = KVCache(limits, b"key", tier=tier)
    tokens = list(range(17))
    table = BlockTable(cache, "", "", len(tokens))
    names = table.name_blocks(tokens, 4)
    for group in range(groups):
        for letter in memory[group]:
            table.load(tokens, group, "abcd".index(letter), now=0)
        for letter in disk[group]:
            tier.put(TierKey(names["abcd".index(letter)], group), 10)
    reach = cache.reach(names)
    assert (reach.length, reach.loads, reach.bytes) == (*expected, 10 * len(expected[1]))
    assert not cache.evicted


def test_what_is_evicted_is_named_while_there_is_a_tier() -> None:
    limits = Capabilities(
        block_size=4, blocks=(2,), windows=(None,), max_rows=1, max_tokens_per_step=16, max_model_len=64
    )
    cache = KVCache(limits, b"key", ttl=10, tier=Tier(100))
    table = BlockTable(cache, "", "", 12)
    tokens = list(range(12))
    first, second = (table.load(tokens, 0, index, now=0) for index in (0, 1))
    table.load(tokens, 0, 2, now=5)  # takes the place of the first
    cache.expire(now=10)  # takes the name of the second
    assert cache.evicted == [(0, first, table.names[0]), (0, second, table.names[1])]
