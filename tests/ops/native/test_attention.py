"""Rotary, cache and attention of every instruction set against the reference; bit-equal however a sequence is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headway.ops.native.backend import NativeBackend
from headway.ops.protocol import Backend, CacheLayout, GroupBatch, Program, Rope, StepBatch
from headway.ops.reference import ReferenceBackend
from headway.shape.model import KVGroup
from tests.ops.native.harness import kernels, random, unchecked, vector

BLOCKS = 200
BROKEN = range(690, 700)  # token ids whose queries, keys and values are NaN


class Layer:
    """One attention layer whose queries, keys and values are rows of tables: token id t has row t of each.

    Args:
        block_size: tokens per block.
        heads: query heads.
        rounded: keys and values are taken at 8 bits per token and head.
    """

    def __init__(
        self,
        backend: Backend,
        group: KVGroup,
        heads: int,
        block_size: int = 16,
        rope: Rope | None = None,
        softcap: float = 0.0,
        tokens: int = 700,
        sunk: bool = False,
        rounded: bool = False,
    ) -> None:
        self.layout = CacheLayout((group,), (BLOCKS,), block_size)
        backend.allocate(self.layout)
        rope = rope or Rope(())
        widths = (heads * group.key_width, group.heads * group.key_width, group.heads * group.value_width)
        tables = []
        for number, width in enumerate(widths):
            rows = random(tokens, width, seed=width + number)
            if rounded and number > 0:
                rows = eight_bits(rows.reshape(tokens, group.heads, -1)).reshape(tokens, -1)
            rows[BROKEN] = np.nan
            tables.append(unchecked(backend, rows))

        sinks = backend.prepare(vector(2 * random(heads, seed=1))) if sunk else None

        def family(ops: Any) -> Any:
            q, k, v = (ops.embed(table) for table in tables)
            q = ops.rope_and_cache(q, k, v, group.layers[0], rope)
            return ops.logit_rows(ops.attention(q, group.layers[0], group.key_width**-0.5, softcap, sinks))

        self.program: Program = backend.compile(family)
        self.free = np.random.default_rng(0).permutation(BLOCKS).tolist()
        self.tables: dict[str, list[int]] = {}
        self.length: dict[str, int] = {}

    def step(self, work: dict[str, Sequence[int]]) -> np.ndarray:
        """Append token ids to the named rows -> attention's result for each new token."""
        size, window = self.layout.block_size, self.layout.groups[0].window
        ids, positions, slots, counts, lengths = [], [], [], [], []
        for name, new in work.items():
            start, table = self.length.get(name, 0), self.tables.setdefault(name, [])
            while len(table) * size < start + len(new):
                table.append(self.free.pop())
            at = np.arange(start, start + len(new))
            ids += list(new)
            positions.append(at)
            slots.append(np.array(table)[at // size] * size + at % size)
            counts.append(len(new))
            lengths.append(start + len(new))
            self.length[name] = start + len(new)
        shown = np.full((len(work), max(len(self.tables[name]) for name in work) + 1), -1, np.int32)
        for row, (name, end, count) in enumerate(zip(work, lengths, counts, strict=True)):
            shown[row, : len(self.tables[name])] = self.tables[name]
            if window:  # blocks behind the window of the step's first query are gone
                shown[row, : max(0, end - count + 1 - window) // size] = -1
        return self.program.run(
            StepBatch(
                ids=np.array(ids, np.int32),
                positions=np.concatenate(positions).astype(np.int32),
                query_start=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
                kv_len=np.array(lengths, np.int32),
                groups=(GroupBatch(shown, np.concatenate(slots).astype(np.int64)),),
                logit_index=np.arange(len(ids), dtype=np.int32),
                adapter=np.zeros(len(work), np.int32),
            )
        ).rows.copy()


def full(heads: int = 2, key_width: int = 32, value_width: int | None = None) -> KVGroup:
    return KVGroup("full", (3,), heads, key_width, value_width or key_width)


def eight_bits(x: np.ndarray) -> np.ndarray:
    """Each number as the nearest whole multiple, up to 127, of a float16 for its row."""
    largest = np.abs(x).max(axis=-1, keepdims=True)
    unit = (largest / np.float32(127)).astype(np.float16)
    unit = np.where(unit.astype(np.float32) * 127 < largest, np.nextafter(unit, np.float16(np.inf)), unit)
    return np.rint(x / unit.astype(np.float32)) * unit.astype(np.float32)


CASES = {
    "one head": (full(1), 1, 16, 0.0),
    "grouped heads, long blocks": (full(2, 64), 6, 32, 0.0),
    "many heads per group": (full(1, 16), 40, 16, 0.0),
    "odd widths, odd blocks": (full(3, 5, 7), 6, 4, 0.0),
    "values wider than keys": (full(2, 24, 80), 4, 16, 0.0),
    "soft cap": (full(2, 128), 4, 32, 1.5),
    "window": (KVGroup("window", (3,), 2, 32, 32, window=50), 4, 16, 0.0),
    "window of one": (KVGroup("window", (3,), 1, 32, 32, window=1), 2, 16, 0.0),
    "window, soft cap, small blocks": (KVGroup("window", (3,), 2, 48, 48, window=300), 4, 8, 5.0),
    "sinks": (full(2, 32), 6, 16, 0.0),
    "sinks, window, soft cap, small blocks": (KVGroup("window", (3,), 2, 24, 32, window=70), 4, 8, 3.0),
}
HISTORY = [
    {"a": range(37), "b": range(100, 101)},
    {"b": range(101, 400)},  # crosses a range of 256 tokens within a chunk
    {"a": [500], "b": [501], "c": range(502, 560)},
    {"a": [600], "b": range(601, 604), "c": [610]},
]


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("case", CASES)
def test_attention_over_a_scattered_cache_equals_the_reference(kernel: str, kv_dtype: str, case: str) -> None:
    group, heads, block_size, softcap = CASES[case]
    backend = NativeBackend(threads=2, kernels=kernel, kv_dtype=kv_dtype)
    native = Layer(backend, group, heads, block_size, softcap=softcap, sunk="sinks" in case)
    reference = Layer(
        ReferenceBackend(poison=True), group, heads, block_size,
        softcap=softcap, sunk="sinks" in case, rounded=kv_dtype == "int8",
    )  # fmt: skip
    atol = {"f32": 2e-5, "bf16": 2e-2, "int8": 2e-2}[kv_dtype]
    for work in HISTORY:
        mine, expected = native.step(work), reference.step(work)
        np.testing.assert_allclose(mine, expected, rtol=0, atol=atol)
        if kv_dtype == "int8":  # a number between two multiples may have taken either
            assert np.abs(mine - expected).mean() < 2e-5


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("case", [case for case in CASES if "blocks" in case])
def test_a_query_is_the_same_bits_however_its_sequence_was_cut(kernel: str, kv_dtype: str, case: str) -> None:
    group, heads, block_size, softcap = CASES[case]
    length = 350

    def layer(threads: int) -> Layer:
        backend = NativeBackend(threads, kernels=kernel, kv_dtype=kv_dtype)
        return Layer(backend, group, heads, block_size, softcap=softcap, sunk="sinks" in case)

    whole = layer(1).step({"a": range(length)})
    for threads, chunk in ((2, 1), (3, 7), (2, 64), (1, 100)):
        other = layer(threads)
        for start in range(0, length, chunk):
            part = range(start, min(start + chunk, length))
            got = other.step({"a": part, "b": [start]} if start % 3 == 0 else {"a": part})
            np.testing.assert_array_equal(got[: len(part)], whole[start : start + len(part)])


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [4, 16])
def test_rope(kernel: str, interleaved: bool, pairs: int) -> None:
    rope = Rope(tuple((10000.0 ** -(np.arange(pairs) / pairs)).tolist()), interleaved, magnitude=1.1)
    backend = NativeBackend(threads=2, kernels=kernel, kv_dtype="f32")
    native, reference = Layer(backend, full(), 4, rope=rope), Layer(ReferenceBackend(), full(), 4, rope=rope)
    for work in ({"a": range(300)}, {"a": [301]}):
        np.testing.assert_allclose(native.step(work), reference.step(work), rtol=0, atol=1e-4)


@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8"])
def test_a_copied_block_is_the_block(kv_dtype: str) -> None:
    if not kernels()[0]:
        pytest.skip("not built")
    backend = NativeBackend(threads=2, kv_dtype=kv_dtype)
    layer = Layer(backend, full(), 4)
    layer.step({"a": range(40)})
    backend.copy_blocks(0, [(block, layer.free.pop(0)) for block in layer.tables["a"]])
    kept = np.random.default_rng(0).permutation(BLOCKS).tolist()[:3]
    layer.tables["b"], layer.length["b"] = kept, layer.length["a"]
    np.testing.assert_array_equal(layer.step({"b": [50]}), layer.step({"a": [50]}))


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("kv_dtype", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("length", [1, 5, 16])
def test_what_a_broken_request_left_in_a_block_does_not_matter(kernel: str, kv_dtype: str, length: int) -> None:
    def layer() -> Layer:
        return Layer(NativeBackend(threads=2, kernels=kernel, kv_dtype=kv_dtype), full(2, 64), 4)

    clean, used = layer(), layer()
    assert np.isnan(used.step({"broken": BROKEN})).all()
    used.free += used.tables.pop("broken")  # taken next
    np.testing.assert_array_equal(used.step({"a": range(length)}), clean.step({"a": range(length)}))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"ids": np.array([700], np.int32)}, "token id"),
        ({"ids": np.array([-1], np.int32)}, "token id"),
        ({"logit_index": np.array([1], np.int32)}, "logit_index"),
        ({"positions": np.array([16 * BLOCKS], np.int32)}, "too short"),
        ({"groups": (GroupBatch(np.array([[-1]], np.int32), np.array([0])),)}, "outside the cache"),
        ({"groups": (GroupBatch(np.array([[BLOCKS]], np.int32), np.array([0])),)}, "outside the cache"),
        ({"groups": (GroupBatch(np.array([[0]], np.int32), np.array([16 * BLOCKS])),)}, "slot"),
        ({"query_start": np.array([0, 2], np.int32)}, "query_start"),
    ],
)
def test_a_batch_that_would_read_or_write_elsewhere_is_refused(change: dict[str, Any], fault: str) -> None:
    if not kernels()[0]:
        pytest.skip("not built")
    layer = Layer(NativeBackend(threads=1), full(), 4)
    batch = StepBatch(
        ids=np.zeros(1, np.int32),
        positions=np.zeros(1, np.int32),
        query_start=np.array([0, 1], np.int32),
        kv_len=np.ones(1, np.int32),
        groups=(GroupBatch(np.zeros((1, 1), np.int32), np.zeros(1, np.int64)),),
        logit_index=np.zeros(1, np.int32),
        adapter=np.zeros(1, np.int32),
    )
    layer.program.run(batch)
    with pytest.raises(ValueError, match=fault):
        layer.program.run(replace(batch, **change))
