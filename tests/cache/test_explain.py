"""Explain a miss: where the prompt left the nearest cached one, and how many tokens that cost."""

from __future__ import annotations

import pytest

from headway.cache.explain import Verdict, explain, left_at
from headway.cache.kv import KVCache
from headway.cache.table import BlockTable
from headway.core.step import Capabilities

PROMPT = list(range(100, 118))  # blocks of 4: four full ones and two tokens more


def cache_with(*prompts: list[int], window: int | None = None, blocks: int = 50) -> KVCache:
    limits = Capabilities(
        block_size=4,
        blocks=(blocks, blocks),
        windows=(None, window),
        max_rows=1,
        max_tokens_per_step=64,
        max_model_len=99,
    )
    cache = KVCache(limits, key=b"secret")
    for prompt in prompts:
        table = BlockTable(cache)
        table.grow(len(prompt))
        table.seal(prompt, len(prompt))
        table.release(now=0)
    return cache


def changed(at: int, token: int = 0) -> list[int]:
    return [*PROMPT[:at], token, *PROMPT[at + 1 :]]


@pytest.mark.parametrize(
    ("prompt", "verdict", "reused", "matched", "cost"),
    [
        (PROMPT, Verdict.FULL, 16, 16, 0),
        (changed(17), Verdict.FULL, 16, 16, 0),
        (changed(0), Verdict.DIVERGED, 0, 0, 16),
        (changed(5), Verdict.DIVERGED, 4, 5, 12),
        (changed(7), Verdict.DIVERGED, 4, 7, 12),
        (changed(15), Verdict.DIVERGED, 12, 15, 4),
        ([*PROMPT[:16], 1, 2, 3, 4, 5], Verdict.NOTHING_BEYOND, 16, 16, 0),
    ],
)
def test_names_the_first_token_that_differs_and_its_cost(
    prompt: list[int], verdict: Verdict, reused: int, matched: int, cost: int
) -> None:
    found = explain(cache_with(PROMPT), prompt)
    assert (found.verdict, found.reused, found.matched, found.cost) == (verdict, reused, matched, cost)
    assert found.prompt == len(prompt)


def test_shows_the_cached_tokens_the_prompt_should_have_had() -> None:
    assert explain(cache_with(PROMPT), changed(5)).cached == (105, 106, 107)


def test_the_nearest_of_several_cached_prompts_is_the_one_compared() -> None:
    other = [*PROMPT[:6], 1, 1, *PROMPT[8:]]
    found = explain(cache_with(changed(5, 9), other), PROMPT)
    assert found.matched == 6 and found.cached == (1, 1)


def test_cost_never_counts_more_than_the_prompt_could_use() -> None:
    assert explain(cache_with([*PROMPT, *range(40)]), changed(5)).cost == 12


def test_other_tenants_are_not_shown() -> None:
    assert explain(cache_with(PROMPT), PROMPT, namespace="other").verdict is Verdict.NOTHING_BEYOND


def test_blocks_lost_by_a_window_group_are_told_apart_from_other_tokens() -> None:
    cache = cache_with(PROMPT, window=6)
    for _ in range(47):
        cache.pools[1].take()
    found = explain(cache, PROMPT)
    assert found.verdict is Verdict.WINDOW and found.matched == 16 and found.cost == 16 - found.reused > 0


@pytest.mark.parametrize(
    ("before", "prompt", "left"),
    [
        ([], PROMPT, None),  # nothing was there
        ([PROMPT], PROMPT, None),  # all that could be reused was
        ([PROMPT], changed(17), None),
        ([PROMPT], changed(0), 0),
        ([PROMPT], changed(5), 5),
        ([changed(4), PROMPT, changed(6)], changed(7), 7),  # the nearest of three
        ([PROMPT], [*PROMPT[:16], 1, 2, 3, 4, 5], None),  # nothing was cached beyond
    ],
)
def test_says_of_a_row_where_it_left_those_before_it(
    before: list[list[int]], prompt: list[int], left: int | None
) -> None:
    cache = cache_with(*before)
    row = BlockTable(cache)
    hit = row.lookup(prompt)
    row.adopt(hit)
    reused = hit.length * cache.block_size
    assert left_at(cache, row, prompt, len(prompt), reused) == left
    row.grow(len(prompt) + 8)
    row.seal([*prompt, *range(8)], len(prompt) + 8)
    later = BlockTable(cache)  # who comes later changes nothing
    later.grow(18)
    later.seal([*prompt[:reused], *range(7, 25 - reused)], 18)
    assert left_at(cache, row, [*prompt, *range(8)], len(prompt), reused) == left
