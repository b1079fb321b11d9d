"""Blocks of one group: blank, cached or owned, least recently used first, forgotten after a while."""

from __future__ import annotations

import pytest

from headway.cache.pool import BlockPool


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def cached(pool: BlockPool, number: int, now: int = 0) -> int:
    """A block that is named `number` and held by nobody."""
    block = pool.take()
    pool.name(block, name(number))
    pool.release(block, now)
    return block


def test_taking_gives_every_block_once_and_then_nothing() -> None:
    pool = BlockPool(3)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    assert pool.available == 0
    with pytest.raises(IndexError):
        pool.take()


def test_an_unnamed_block_is_blank_again_when_released() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.release(block, now=0)
    assert pool.available == 2 and not pool.cached
    assert pool.take() == block, "the block given back last is taken first"


def test_a_named_block_is_cached_when_released_and_a_hit_revives_it() -> None:
    pool = BlockPool(1)
    block = cached(pool, 7)
    assert pool.available == 1 and pool.by_name[name(7)] == block
    pool.share(block)
    assert pool.available == 0 and pool.by_name[name(7)] == block


def test_a_shared_block_stays_until_its_last_owner_releases_it() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.share(block)
    pool.release(block, now=0)
    assert pool.available == 0
    pool.release(block, now=0)
    assert pool.available == 1


def test_blank_blocks_are_taken_before_cached_ones_and_those_least_recently_released_first() -> None:
    pool = BlockPool(3)
    taken = [pool.take() for _ in range(3)]
    for number, block in enumerate(taken[:2]):
        pool.name(block, name(number))
    pool.release(taken[1], now=1)
    pool.release(taken[0], now=2)
    pool.release(taken[2], now=3)
    assert [pool.take() for _ in range(3)] == [taken[2], taken[1], taken[0]]
    assert not pool.by_name, "a taken block loses its name"


def test_a_revived_block_is_recent_again() -> None:
    pool = BlockPool(2)
    held = [pool.take(), pool.take()]
    for number, block in enumerate(held):
        pool.name(block, name(number))
        pool.release(block, now=number)
    pool.share(held[0])
    pool.release(held[0], now=2)
    assert pool.take() == held[1]


def test_the_twin_of_a_named_block_stays_unnamed() -> None:
    pool = BlockPool(2)
    first, twin = pool.take(), pool.take()
    pool.name(first, name(1))
    pool.name(twin, name(1))
    assert pool.by_name == {name(1): first} and pool.names[twin] is None


@pytest.mark.parametrize(("now", "left"), [(9, [1, 2]), (10, [2]), (14, [2]), (15, [])])
def test_cached_blocks_expire_after_their_time_to_live(now: int, left: list[int]) -> None:
    pool = BlockPool(2, ttl=10)
    blocks = [pool.take(), pool.take()]
    for number, (block, released) in enumerate(zip(blocks, (0, 5), strict=True), start=1):
        pool.name(block, name(number))
        pool.release(block, released)
    pool.expire(now)
    assert sorted(pool.by_name) == [name(number) for number in left]
    assert pool.available == 2, "an expired block is still available"


def test_listeners_hear_of_every_name_once_when_it_comes_and_goes() -> None:
    heard: list[tuple[str, int]] = []
    pool = BlockPool(
        1,
        on_named=lambda n: heard.append(("named", int.from_bytes(n, "big"))),
        on_forgotten=lambda n: heard.append(("forgotten", int.from_bytes(n, "big"))),
    )
    cached(pool, 1)
    cached(pool, 2)
    assert heard == [("named", 1), ("forgotten", 1), ("named", 2)]
