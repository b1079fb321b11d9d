"""Why a prompt was not served from the cache: where it left the nearest cached prompt, and what that cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import islice, takewhile

import msgspec

from headway.cache.kv import KVCache
from headway.cache.table import BlockTable

MOST_COMPARED = 64  # cached blocks after the same prefix, where a live engine is asked


class Verdict(Enum):
    """What kept the hit from being longer."""

    FULL = "every full block before the last token is reused"
    DIVERGED = "the nearest cached prompt has another token here"
    NOTHING_BEYOND = "the cache holds nothing beyond this point: never computed, or given up since"
    WINDOW = "the tokens match, but a sliding-window layer no longer holds the blocks before this point"


class Explanation(msgspec.Struct, frozen=True):
    """The fate of a prompt in the prefix cache, at token granularity.

    Attributes:
        verdict: what ended the match.
        prompt: tokens of the prompt.
        reused: tokens that a lookup reuses now.
        matched: tokens from the start that agree with the nearest cached prompt; the index of the first that differs.
        cost: tokens that the nearest cached prompt would have saved, and that must be computed because of the verdict.
        cached: tokens of the nearest cached prompt from `matched` to the end of that block; () unless it diverged.
    """

    verdict: Verdict
    prompt: int
    reused: int
    matched: int
    cost: int = 0
    cached: tuple[int, ...] = ()


def explain(cache: KVCache, tokens: Sequence[int], namespace: str = "", adapter: str = "") -> Explanation:
    """Compare a prompt with everything cached in its namespace, for its adapter. Changes nothing."""
    table = BlockTable(cache, namespace, adapter, len(tokens))
    size = cache.block_size
    names = table.name_blocks(tokens, (len(tokens) - 1) // size)
    reused = cache.lookup(names, tokens).length
    known = next((index for index, name in enumerate(names) if name not in cache.known), len(names))
    if reused < known:
        return Explanation(Verdict.WINDOW, len(tokens), reused * size, known * size, (known - reused) * size)
    if known == len(names):
        return Explanation(Verdict.FULL, len(tokens), reused * size, known * size)
    parent = names[known - 1] if known else table.root
    nearest, common = _nearest(cache, cache.children.get(parent, ()), tokens[known * size : (known + 1) * size])
    if nearest is None:
        return Explanation(Verdict.NOTHING_BEYOND, len(tokens), reused * size, known * size)
    saved = min(len(names), known + _depth(cache, nearest))
    return Explanation(
        verdict=Verdict.DIVERGED,
        prompt=len(tokens),
        reused=reused * size,
        matched=known * size + common,
        cost=(saved - reused) * size,
        cached=cache.hasher.unpack(cache.known[nearest].payload)[common:],
    )


def left_at(cache: KVCache, table: BlockTable, tokens: Sequence[int], prompt: int, reused: int) -> int | None:
    """Where a row, of `prompt` tokens and those it generated, left the prompts that were cached before it, when it
    reused so many: how many of its first tokens the nearest of them shares. None: nothing cached began like it and went
    on for another block, or no more could have been reused. Looks at `MOST_COMPARED` blocks, and changes nothing."""
    index = reused // cache.block_size
    if index >= min(len(table.names), (prompt - 1) // cache.block_size):
        return None
    parent = table.names[index - 1] if index else table.root
    earlier = takewhile(lambda name: name != table.names[index], cache.children.get(parent, ()))
    start = index * cache.block_size
    block = tokens[start : start + cache.block_size]
    nearest, common = _nearest(cache, islice(earlier, MOST_COMPARED), block)
    return None if nearest is None else start + common


def _nearest(cache: KVCache, names: Iterable[bytes], block: Sequence[int]) -> tuple[bytes | None, int]:
    """Of cached blocks the one that agrees longest with `block`, and for how many tokens."""
    nearest, longest = None, -1
    for name in names:
        cached = cache.hasher.unpack(cache.known[name].payload)
        common = next((i for i, (a, b) in enumerate(zip(cached, block, strict=True)) if a != b), len(block))
        if common > longest:
            nearest, longest = name, common
    return nearest, longest


def _depth(cache: KVCache, name: bytes) -> int:
    """Blocks on the longest cached chain that starts with `name`."""
    depth, level = 0, [name]
    while level:
        depth += 1
        level = [child for parent in level for child in cache.children.get(parent, ())]
    return depth
