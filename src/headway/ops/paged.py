"""Attention over a paged cache and rotary positions, in numpy float32: what the reference computes of one layer."""

from __future__ import annotations

import numpy as np

from headway.ops.protocol import GroupBatch


class LayerCache:
    """Keys and values of one layer, each [block][head][slot][width]. Values of latent attention are a view of the keys'
    first numbers."""

    def __init__(self, group: int, window: int | None, keys: np.ndarray, values: np.ndarray) -> None:
        self.group = group
        self.window = window
        self.keys = keys
        self.values = values


def attend(
    q: np.ndarray,
    positions: np.ndarray,
    cache: LayerCache,
    group: GroupBatch,
    rows: np.ndarray,
    softcap: float,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Causal attention of a rectangle of queries over the paged cache.

    Args:
        q: [n, c, heads, width], scaled: c queries of each of n rows.
        positions: [n, c], increasing along c.
        rows: [n], their rows in `group.block_table`.
        sinks: [heads], scores that only share in the softmax.

    Returns:
        [n, c, heads, value_width].
    """
    n, c, heads, _ = q.shape
    scores, total, at, table = _weigh(q, positions, cache, group, rows, softcap, sinks)
    values = gather(cache.values, table)
    # A slot no query sees may hold anything, NaN included, and 0 * NaN is NaN.
    unseen = ~_visible(at, positions, cache).any(axis=1)  # [n, s]
    values.swapaxes(1, 2)[unseen] = 0.0
    kv_heads = scores.shape[1]
    out = (scores.reshape(n, kv_heads, -1, len(at)) @ values).reshape(*scores.shape[:-1], -1) / total
    return out.transpose(0, 3, 1, 2, 4).reshape(n, c, heads, -1)


def attention_weights(
    q: np.ndarray,
    position: int,
    cache: LayerCache,
    group: GroupBatch,
    row: int,
    softcap: float,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """What one query of `attend` gives each position, its own the last: q [heads, width] -> [heads, position + 1]. Rows
    sum to 1, less what sinks take."""
    positions = np.array([[position]])
    scores, total, at, _ = _weigh(q[None, None], positions, cache, group, np.array([row]), softcap, sinks)
    out = np.zeros((len(q), position + 1), np.float32)
    seen = at <= position
    out[:, at[seen]] = (scores / total).reshape(len(q), len(at))[:, seen]
    return out


def _visible(at: np.ndarray, positions: np.ndarray, cache: LayerCache) -> np.ndarray:
    """Which of the gathered slots [s] a query looks at -> [n, c, s]."""
    visible = at <= positions[:, :, None]
    if cache.window is not None:
        visible &= at > positions[:, :, None] - cache.window
    return visible


def _weigh(
    q: np.ndarray,
    positions: np.ndarray,
    cache: LayerCache,
    group: GroupBatch,
    rows: np.ndarray,
    softcap: float,
    sinks: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """exp(score - largest) [n, kv_heads, queries per kv head, c, s], their sums [..., 1] with the sinks', the position
    of each gathered slot [s], and its blocks [n, blocks]."""
    n, c, _, width = q.shape
    _, kv_heads, block_size, _ = cache.keys.shape
    first = 0 if cache.window is None else max(0, positions.min() + 1 - cache.window) // block_size
    last = positions.max() // block_size + 1
    table = group.block_table[rows, first:last]  # [n, blocks]
    at = np.arange(first * block_size, last * block_size)
    keys = gather(cache.keys, table)
    # [n, kv_heads, queries per kv head, width] @ [n, kv_heads, width, s]
    grouped = q.reshape(n, c, kv_heads, -1, width).transpose(0, 2, 3, 1, 4).reshape(n, kv_heads, -1, width)
    scores = cap(grouped @ keys.swapaxes(2, 3), softcap).reshape(n, kv_heads, -1, c, len(at))
    np.copyto(scores, -np.inf, where=~_visible(at, positions, cache)[:, None, None])
    largest = scores.max(axis=-1, keepdims=True)  # [n, kv_heads, queries per kv head, c, 1]
    if sinks is not None:
        at_sink = sinks.reshape(kv_heads, -1, 1, 1)
        largest = np.maximum(largest, at_sink)
    scores -= largest
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(at_sink - largest)
    return scores, total, at, table


def gather(pages: np.ndarray, table: np.ndarray) -> np.ndarray:
    """pages [blocks, heads, slots, width], table [n, b] -> a copy [n, heads, b * slots, width]; -1 reads block 0."""
    blocks, heads, slots, width = pages.shape
    index = np.maximum(table, 0)[:, None] * heads + np.arange(heads)[:, None]  # [n, heads, b]
    return pages.reshape(blocks * heads, slots, width)[index].reshape(len(table), heads, -1, width)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotate the first rotary_dim numbers of every head of x [T, heads, width] by the angle of its position."""
    half = cos.shape[-1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    )
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def cap(x: np.ndarray, softcap: float) -> np.ndarray:
    """softcap * tanh(x / softcap); x itself if softcap is 0."""
    return x if softcap == 0.0 else np.float32(softcap) * np.tanh(x / np.float32(softcap))
