"""The reference operations against definitions written one token and one head at a time, in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.ops.protocol import CacheLayout, GroupBatch, Rope, StepBatch
from headway.ops.reference import ReferenceBackend, ReferenceOps
from headway.ops.weight import Weight
from headway.shape.model import KVGroup

SLOTS = 4


def batch(ids: list[int], logit_index: list[int] = ()) -> StepBatch:  # type: ignore[assignment]
    """One row from position 0, no cache."""
    n = len(ids)
    return StepBatch(
        ids=np.array(ids, np.int32),
        positions=np.arange(n, dtype=np.int32),
        query_start=np.array([0, n], np.int32),
        kv_len=np.array([n], np.int32),
        groups=(),
        logit_index=np.array(logit_index, np.int32),
        adapter=np.zeros(1, np.int32),
    )


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


class Attention:
    """Rows with a known past in a poisoned, scattered cache; the naive answer beside the backend's."""

    def __init__(self, group: KVGroup, lengths: list[tuple[int, int]], seed: int = 0) -> None:
        """lengths: (tokens cached before, new tokens) per row."""
        self.group, self.lengths = group, lengths
        rng = np.random.default_rng(seed)
        self.heads = group.heads * int(rng.integers(1, 4))
        self.backend = ReferenceBackend(poison=True)
        blocks = sum(-(-(past + new) // SLOTS) for past, new in lengths) + 3
        self.backend.allocate(CacheLayout((group,), (blocks,), SLOTS))
        cache = self.backend.caches[0]
        free = rng.permutation(blocks).tolist()
        self.table = np.full((len(lengths), max(-(-(p + n) // SLOTS) for p, n in lengths) + 1), -1, np.int32)
        self.keys, self.values, self.queries = [], [], []
        for row, (past, new) in enumerate(lengths):
            total = past + new
            self.keys.append(rng.standard_normal((total, group.heads, group.key_width)).astype(np.float32))
            self.values.append(rng.standard_normal((total, group.heads, group.value_width)).astype(np.float32))
            self.queries.append(rng.standard_normal((new, self.heads, group.key_width)).astype(np.float32))
            for j in range(-(-total // SLOTS)):
                outside = group.window is not None and (j + 1) * SLOTS <= past + 1 - group.window
                if outside:
                    continue  # the block behind the window was freed: -1
                block = self.table[row, j] = free.pop()
                part = slice(j * SLOTS, min((j + 1) * SLOTS, total))
                cache.keys[block, :, : part.stop - part.start] = self.keys[row][part].swapaxes(0, 1)
                cache.values[block, :, : part.stop - part.start] = self.values[row][part].swapaxes(0, 1)

    def answer(self, softcap: float = 0.0, sinks: np.ndarray | None = None) -> np.ndarray:
        new = [n for _, n in self.lengths]
        start = np.concatenate(([0], np.cumsum(new))).astype(np.int32)
        positions = np.concatenate([np.arange(p, p + n) for p, n in self.lengths]).astype(np.int32)
        step = StepBatch(
            ids=np.zeros(start[-1], np.int32),
            positions=positions,
            query_start=start,
            kv_len=np.array([p + n for p, n in self.lengths], np.int32),
            groups=(GroupBatch(self.table, np.zeros(start[-1], np.int64)),),
            logit_index=np.zeros(0, np.int32),
            adapter=np.zeros(len(new), np.int32),
        )
        q = np.concatenate(self.queries).reshape(start[-1], -1)
        return ReferenceOps(self.backend.caches, step).attention(q, 0, 0.3, softcap, sinks)

    def naive(self, softcap: float = 0.0, sinks: np.ndarray | None = None) -> np.ndarray:
        out = []
        per_kv = self.heads // self.group.heads
        for (past, _), queries, keys, values in zip(self.lengths, self.queries, self.keys, self.values, strict=True):
            for t, query in enumerate(queries.astype(np.float64)):
                low = 0 if self.group.window is None else max(0, past + t + 1 - self.group.window)
                for head in range(self.heads):
                    scores = keys[low : past + t + 1, head // per_kv] @ query[head] * 0.3
                    scores = softcap * np.tanh(scores / softcap) if softcap else scores
                    weights = np.exp(scores)
                    total = weights.sum() + (0 if sinks is None else np.exp(sinks[head]))
                    out.append(weights / total @ values[low : past + t + 1, head // per_kv])
        return np.array(out).reshape(sum(n for _, n in self.lengths), -1)


@settings(deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 30), st.sampled_from([0, 1, 1, 1, 2, 3, 17, 40])), min_size=1, max_size=5
    ),
    window=st.sampled_from([None, 1, 3, 4, 9, 100]),
    kv_heads=st.integers(1, 3),
    softcap=st.sampled_from([0.0, 2.0]),
    sunk=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attention_is_softmax_over_what_each_token_may_see(
    lengths: list[tuple[int, int]], window: int | None, kv_heads: int, softcap: float, sunk: bool, seed: int
) -> None:
    """Grouped heads, windows, softcap, sinks, keys and values of different width, mixed row lengths, NaN in every slot
    that must not be read."""
    if sum(new for _, new in lengths) == 0:
        lengths = [*lengths, (5, 1)]
    lengths = [(past if new else 3, new) for past, new in lengths]
    kind = "full" if window is None else "window"
    case = Attention(KVGroup(kind, (0,), kv_heads, 6, 5, window), lengths, seed)
    sinks = 3 * random(case.heads, seed=seed) if sunk else None
    np.testing.assert_allclose(case.answer(softcap, sinks), case.naive(softcap, sinks), rtol=1e-4, atol=1e-5)


def test_attention_of_a_long_chunk_crosses_tiles() -> None:
    case = Attention(KVGroup("full", (0,), 1, 4, 4), [(10, 300), (7, 1)])
    np.testing.assert_allclose(case.answer(), case.naive(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_rotates_pairs_by_position_and_writes_the_cache(interleaved: bool) -> None:
    group = KVGroup("full", (0,), 2, 6, 3)
    backend = ReferenceBackend(poison=True)
    backend.allocate(CacheLayout((group,), (3,), SLOTS))
    rope = Rope((1.0, 0.1), interleaved, magnitude=1.5)  # 4 of 6 numbers rotate
    step = batch([0] * 5)
    slots = np.array([8, 9, 10, 11, 2], np.int64)
    step = StepBatch(**{**step.__dict__, "groups": (GroupBatch(np.array([[2, 0]], np.int32), slots),)})
    q, k, v = random(5, 3 * 6), random(5, 2 * 6, seed=1), random(5, 2 * 3, seed=2)

    def expected(x: np.ndarray) -> np.ndarray:
        out = x.reshape(5, -1, 6).astype(np.float64)
        for t in range(5):
            for pair, (a, b) in enumerate([(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]):
                angle = t * float(rope.inv_freq[pair])
                turn = complex(math.cos(angle), math.sin(angle)) * 1.5
                z = (out[t, :, a] + 1j * out[t, :, b]) * turn
                out[t, :, a], out[t, :, b] = z.real, z.imag
        return out

    rotated = ReferenceOps(backend.caches, step).rope_and_cache(q, k, v, 0, rope)
    np.testing.assert_allclose(rotated.reshape(5, 3, 6), expected(q), atol=1e-5)
    cache = backend.caches[0]
    np.testing.assert_allclose(cache.keys[slots // SLOTS, :, slots % SLOTS], expected(k), atol=1e-5)
    np.testing.assert_array_equal(cache.values[slots // SLOTS, :, slots % SLOTS], v.reshape(5, 2, 3))
    assert np.isnan(cache.keys).sum() == (3 * SLOTS - 5) * 2 * 6  # nothing else was written


def test_plain_operations() -> None:
    x, weight, bias, residual = random(3, 8), random(5, 8, seed=1), random(5, seed=2), random(3, 5, seed=3)
    ops = ReferenceOps({}, batch([2, 0, 2], logit_index=[2, 0]))
    before = x.copy(), residual.copy()
    np.testing.assert_array_equal(ops.embed(weight), weight[[2, 0, 2]])
    np.testing.assert_array_equal(ops.embed(weight, 0.5), weight[[2, 0, 2]] / 2)
    np.testing.assert_allclose(ops.linear(x, weight), x @ weight.T, atol=1e-6)
    np.testing.assert_allclose(ops.linear(x, weight, bias, residual), x @ weight.T + bias + residual, atol=1e-6)
    np.testing.assert_allclose(
        ops.rms_norm(x, x[0], 1e-3), x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-3) * x[0], rtol=1e-5
    )
    np.testing.assert_array_equal(ops.rms_norm(x, x[0], 1e-3, x), ops.rms_norm(x, x[0], 1e-3) + x)
    np.testing.assert_array_equal(
        ops.rms_norm(x, x[0, :2], 1e-3), ops.rms_norm(x.reshape(12, 2), x[0, :2], 1e-3).reshape(3, 8)
    )
    assert ops.rms_norm(x[:0], x[0, :2], 1e-3).shape == (0, 8)  # a step may want no logits
    np.testing.assert_array_equal(ops.logit_rows(x), x[[2, 0]])
    np.testing.assert_allclose(ops.logits(x, weight, 0.5), 0.5 * (x @ weight.T), atol=1e-6)
    np.testing.assert_allclose(ops.logits(x, weight, 2.0, 3.0), 3 * np.tanh(2 * (x @ weight.T) / 3), atol=1e-5)
    np.testing.assert_array_equal(ops.all_reduce(x), x)
    np.testing.assert_array_equal(x, before[0])
    np.testing.assert_array_equal(residual, before[1])


def test_layer_norm_of_rows_and_of_their_parts() -> None:
    ops, x = ReferenceOps({}, batch([0] * 3)), random(3, 8)
    weight, bias = random(8, seed=1), random(8, seed=2)

    def normed(rows: np.ndarray) -> np.ndarray:
        return (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-3)

    np.testing.assert_allclose(ops.layer_norm(x, weight, bias, 1e-3), normed(x) * weight + bias, atol=1e-5)
    np.testing.assert_allclose(ops.layer_norm(x, weight, None, 1e-3), normed(x) * weight, atol=1e-5)
    heads = normed(x.reshape(3, 2, 4))
    np.testing.assert_allclose(
        ops.layer_norm(x, weight, None, 1e-3, 2), (heads * weight.reshape(2, 4)).reshape(3, 8), atol=1e-5
    )
    shared = (heads * weight[:4] + bias[:4]).reshape(3, 8)
    np.testing.assert_allclose(ops.layer_norm(x, weight[:4], bias[:4], 1e-3, 2), shared, atol=1e-5)


def test_embeddings_of_tokens_and_positions() -> None:
    ops, table, positions = ReferenceOps({}, batch([4, 1, 0])), random(6, 8), random(9, 8, seed=1)
    expected = 2 * table[ops._batch.ids] + positions[ops._batch.positions]
    np.testing.assert_allclose(ops.embed(table, 2.0, positions), expected, rtol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu", "relu2"])
def test_gated_mlp(activation: str) -> None:
    x, gate, up, down, residual = random(3, 4), random(6, 4), random(6, 4, seed=1), random(4, 6, seed=2), random(3, 4)
    x[0] = 1e3  # exp overflows: the limit is still right, without a warning
    act = {
        "silu": lambda z: z / (1 + math.exp(-z)) if z > -700 else 0.0,
        "gelu_tanh": lambda z: 0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
        "gelu": lambda z: 0.5 * z * (1 + math.erf(z / math.sqrt(2))),
        "relu": lambda z: max(z, 0.0),
        "relu2": lambda z: max(z, 0.0) ** 2,
    }[activation]
    hidden = np.vectorize(act)(x.astype(np.float64) @ gate.T) * (x @ up.T)
    mine = ReferenceOps({}, batch([0] * 3)).gated_mlp(x, gate, up, down, activation, residual)
    np.testing.assert_allclose(mine, hidden @ down.T + residual, rtol=1e-4, atol=1e-4)
    one, two, three = random(6, seed=3), random(6, seed=4), random(4, seed=5)
    hidden = np.vectorize(act)(x.astype(np.float64) @ gate.T + one) * (x @ up.T + two)
    mine = ReferenceOps({}, batch([0] * 3)).gated_mlp(x, gate, up, down, activation, None, one, two, three)
    np.testing.assert_allclose(mine, hidden @ down.T + three, rtol=1e-4, atol=1e-4)


def test_copied_blocks_are_copied_in_every_layer_of_the_group_only() -> None:
    groups = (KVGroup("full", (0, 2), 1, 2, 3), KVGroup("window", (1,), 1, 2, 2, window=8))
    backend = ReferenceBackend()
    backend.allocate(CacheLayout(groups, (4, 4), SLOTS))
    for layer, cache in backend.caches.items():
        cache.keys[...] = np.arange(4)[:, None, None, None] + 10 * layer
        cache.values[...] = np.arange(4)[:, None, None, None] - 10 * layer
    backend.copy_blocks(0, [(1, 3), (0, 2)])
    for layer, cache in backend.caches.items():
        order = np.array([0, 1, 0, 1] if layer != 1 else [0, 1, 2, 3])
        np.testing.assert_array_equal(cache.keys[:, 0, 0, 0], order + 10 * layer)
        np.testing.assert_array_equal(cache.values[:, 0, 0, 0], order - 10 * layer)


def test_what_it_cannot_do_is_refused() -> None:
    backend = ReferenceBackend()
    with pytest.raises(NotImplementedError, match="state"):
        backend.allocate(CacheLayout((KVGroup("state", (0,), 1, 8, 0),), (4,), SLOTS))
    step = batch([0])
    with pytest.raises(ValueError, match="adapter"):
        backend.compile(lambda ops: None).run(StepBatch(**{**step.__dict__, "adapter": np.array([1], np.int32)}))


def test_prepared_weights_are_aligned_float32() -> None:
    shifted = np.zeros(4 * 6 + 1, np.uint8)[1:]
    prepared = ReferenceBackend().prepare(Weight("w", (2, 3), "f32", shifted))
    assert prepared.dtype == np.float32 and prepared.shape == (2, 3) and prepared.flags.aligned
