"""The block table: growing, sharing a prefix, forking, trimming behind a window, and giving everything back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest

from headway.cache.kv import KVCache
from headway.cache.table import BlockTable
from headway.core.step import BlockCopy, Capabilities

BLOCK = 4
PROMPT = list(range(100, 118))  # 18 tokens: four full blocks and two more


def cache_of(*groups: tuple[int, int | None], in_flight: int = 1, **options: object) -> KVCache:
    """Groups as (blocks, window)."""
    limits = Capabilities(
        block_size=BLOCK,
        blocks=tuple(blocks for blocks, _ in groups),
        windows=tuple(window for _, window in groups),
        max_rows=4,
        max_tokens_per_step=16,
        max_model_len=1000,
        max_in_flight=in_flight,
    )
    return KVCache(limits, key=b"secret", verify=True, **options)  # type: ignore[arg-type]


def computed(cache: KVCache, tokens: Sequence[int], tenant: str = "", adapter: str = "") -> BlockTable:
    """The table of a request whose tokens are all computed."""
    table = BlockTable(cache, tenant, adapter)
    assert table.grow(len(tokens)) is not None
    table.seal(tokens, len(tokens))
    table.trim(len(tokens), now=0)
    return table


def test_growing_takes_just_the_blocks_that_are_missing_in_every_group() -> None:
    table = BlockTable(cache_of((9, None), (9, 6)))
    assert table.grow(5) == ((0, 1), (0, 1))
    assert table.grow(8) == ()
    assert table.grow(9) == ((2,), (2,))
    assert table.capacity == 12 and table.ids() == ((0, 1, 2), (0, 1, 2))


def test_growing_takes_nothing_anywhere_if_one_group_has_not_enough() -> None:
    cache = cache_of((9, None), (2, 6))
    table = BlockTable(cache)
    assert table.grow(9) is None
    assert [pool.available for pool in cache.pools] == [9, 2]
    assert table.room() == 8


def test_release_gives_everything_back_and_may_be_said_twice() -> None:
    cache = cache_of((9, None), (9, 6))
    table = computed(cache, PROMPT)
    for _ in range(2):
        table.release(now=1)
        assert [pool.available for pool in cache.pools] == [9, 9]


def test_the_end_of_a_prefix_is_evicted_before_its_start() -> None:
    cache = cache_of((5, None))
    table = computed(cache, PROMPT)
    start, *_, last_full, _ = table.ids()[0]
    table.release(now=0)
    cache.pools[0].take()  # the block that was only part-filled
    assert cache.pools[0].take() == last_full
    assert cache.lookup(table.names, PROMPT).blocks[0][0] == start


@pytest.mark.parametrize(
    ("prompt", "hit"),
    [
        (PROMPT, 4),
        (PROMPT[:17], 4),
        (PROMPT[:16], 3),  # capped below the last prompt token, which is always computed
        (PROMPT[:15], 3),
        (PROMPT[:1], 0),
        ([*PROMPT[:9], 0, *PROMPT[10:]], 2),
        ([0, *PROMPT[1:]], 0),
        ([*PROMPT, 1, 2, 3], 4),
    ],
)
def test_a_lookup_finds_the_longest_prefix_of_full_blocks(prompt: list[int], hit: int) -> None:
    cache = cache_of((9, None))
    owner = computed(cache, PROMPT)
    found = BlockTable(cache).lookup(prompt)
    assert found.length == hit and tuple(found.blocks[0]) == owner.ids()[0][:hit]


@pytest.mark.parametrize(("tenant", "adapter"), [("b", ""), ("", "style"), ("a", "style")])
def test_tenants_and_adapters_never_share(tenant: str, adapter: str) -> None:
    cache = cache_of((9, None))
    computed(cache, PROMPT, tenant="a")
    assert BlockTable(cache, tenant, adapter).lookup(PROMPT).length == 0
    assert BlockTable(cache, "a").lookup(PROMPT).length == 4


def test_adopting_shares_blocks_and_continues_the_chain() -> None:
    cache = cache_of((9, None))
    first = computed(cache, PROMPT)
    second = BlockTable(cache)
    second.adopt(second.lookup(PROMPT))
    assert second.capacity == second.sealed * BLOCK == 16
    assert all(cache.pools[0].refs[block] == 2 for block in second.ids()[0])
    first.release(now=0)
    assert second.grow(18) is not None
    longer = [*PROMPT, 1, 2]
    second.seal(longer, 20)
    assert BlockTable(cache).lookup([*longer, 3]).length == 5


def test_a_hit_revives_blocks_nobody_holds() -> None:
    cache = cache_of((5, None))
    computed(cache, PROMPT).release(now=0)
    table = BlockTable(cache)
    table.adopt(table.lookup(PROMPT))
    assert cache.pools[0].available == 1


class TestWindow:
    """A group whose layers look back over 6 positions: the query at p sees p - 5 to p."""

    def test_blocks_behind_it_are_given_back(self) -> None:
        cache = cache_of((9, None), (9, 6))
        table = BlockTable(cache)
        table.grow(18)
        for position, first in [(8, 0), (9, 1), (12, 1), (13, 2), (17, 3)]:
            table.seal(PROMPT, position)
            table.trim(position, now=0)
            assert table.first == [0, first]
            assert table.ids()[1][:first] == (-1,) * first
        assert [pool.available for pool in cache.pools] == [4, 4 + 3]

    def test_a_hit_needs_only_what_the_next_query_sees(self) -> None:
        cache = cache_of((9, None), (9, 6))
        computed(cache, PROMPT)  # holds window blocks 3 and 4; 0 to 2 are cached
        hit = BlockTable(cache).lookup(PROMPT)
        assert hit.length == 4 and hit.first == [0, 2] and hit.blocks[1][:2] == [-1, -1]

    @pytest.mark.parametrize(
        ("evicted", "hit"), [({0}, 4), ({1}, 4), ({2}, 2), ({3}, 3), ({1, 3}, 1), ({0, 3}, 3), ({0, 1, 2, 3}, 0)]
    )
    def test_a_hit_shrinks_until_the_blocks_before_it_are_there(self, evicted: set[int], hit: int) -> None:
        cache = cache_of((9, None), (5, 6))
        table = computed(cache, PROMPT)
        table.release(now=0)
        pool = cache.pools[1]
        for index in {0, 1, 2, 3} - evicted:
            pool.share(pool.by_name[table.names[index]])
        while pool.available:
            pool.take()
        assert BlockTable(cache).lookup(PROMPT).length == hit

    @pytest.mark.parametrize("window", [1, 3, 4, 5, 6, 16, 100])
    @pytest.mark.parametrize("step", [1, 5, 16])
    @pytest.mark.parametrize("first", [1, 2, 3, 4])
    @pytest.mark.parametrize("in_flight", [1, 2])
    def test_holding_bounds_what_a_row_ever_holds(self, window: int, step: int, first: int, in_flight: int) -> None:
        cache = cache_of((40, window), in_flight=in_flight)
        table = BlockTable(cache)
        tokens, planned = list(range(120)), deque[int]()
        for end in (*range(first, 120, step), 120):
            assert table.grow(end) is not None
            assert table.held(0) <= cache.holding(0, 120)
            planned.append(end)
            if len(planned) == in_flight:
                table.seal(tokens, planned[0])
                table.trim(planned.popleft(), now=0)


class TestFork:
    """Another choice of the same prompt shares its full blocks and copies the part-filled one."""

    def test_shares_full_blocks_and_copies_the_one_it_will_write(self) -> None:
        cache = cache_of((9, None), (9, None))
        parent = computed(cache, PROMPT)
        child = BlockTable(cache)
        hit = parent.forkable(17)
        assert hit is not None
        child.adopt(hit)
        copies = child.copy_partial(parent, 17)
        assert child.ids()[0][:4] == parent.ids()[0][:4]
        assert copies == tuple(BlockCopy(g, parent.ids()[g][4], child.ids()[g][4]) for g in (0, 1))
        assert child.ids()[0][4] != parent.ids()[0][4]

    def test_copies_nothing_when_the_last_prompt_token_starts_a_block(self) -> None:
        cache = cache_of((9, None))
        parent = computed(cache, PROMPT[:17])
        child = BlockTable(cache)
        hit = parent.forkable(16)
        assert hit is not None and hit.length == 4
        child.adopt(hit)
        assert child.copy_partial(parent, 16) == ()

    def test_copies_a_full_block_too_because_its_last_slot_is_written_again(self) -> None:
        cache = cache_of((9, None))
        parent = computed(cache, PROMPT[:16])
        hit = parent.forkable(15)
        assert hit is not None and hit.length == 3
        child = BlockTable(cache)
        child.adopt(hit)
        assert len(child.copy_partial(parent, 15)) == 1

    def test_continues_the_chain_of_names_though_it_never_named_the_shared_blocks(self) -> None:
        cache = cache_of((9, None))
        parent = computed(cache, PROMPT)
        child = BlockTable(cache)
        hit = parent.forkable(17)
        assert hit is not None
        child.adopt(hit)
        child.copy_partial(parent, 17)
        answer = [*PROMPT, 7, 8]
        child.seal(answer, 20)
        assert BlockTable(cache).lookup([*answer, 9]).blocks[0] == list(child.ids()[0])

    def test_is_refused_once_the_parent_has_moved_its_window_on(self) -> None:
        cache = cache_of((9, 6))
        parent = computed(cache, PROMPT)
        assert parent.forkable(17) is not None
        parent.grow(25)
        parent.seal([*PROMPT, *range(7)], 25)
        parent.trim(25, now=0)
        assert parent.forkable(17) is None


def test_equal_names_with_other_tokens_are_caught_in_debug() -> None:
    cache = cache_of((9, None))
    table = computed(cache, PROMPT)
    with pytest.raises(AssertionError, match="same name, other tokens"):
        cache.lookup(table.names[:4], [0, *PROMPT[1:]])
