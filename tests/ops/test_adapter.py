"""Adapters: what they add to linear layers, and that a row knows nothing of its neighbours' adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from headway.ops.adapter import Adapted, adapted, linear_layers
from headway.ops.native.backend import NativeBackend
from headway.ops.protocol import Backend, GroupBatch, Prepared, StepBatch
from headway.ops.recording import RecordingBackend
from headway.ops.reference import ReferenceBackend
from tests.ops.native.harness import ONE_LAYER, kernels, matrix, random

D, F = 48, 160  # width of the model and of its MLP
COUNT, RANK = 3, 40
SHAPES = {"q": (D, D), "k": (32, D), "gate": (F, D), "up": (F, D), "down": (D, F)}
# Adapter -> layer -> (rank, scale); adapter 2 leaves most layers alone.
ADAPTERS = {
    1: dict.fromkeys(SHAPES, (8, 2.0)),
    2: {"k": (3, 0.5), "down": (1, -1.0)},
    3: dict.fromkeys(SHAPES, (40, 0.25)),
}
TOKENS = random(400, D, seed=9)


def low_rank(number: int, layer: str) -> tuple[np.ndarray, np.ndarray]:
    (out, inputs), rank, seed = SHAPES[layer], ADAPTERS[number][layer][0], 100 * number + len(layer)
    return random(rank, inputs, seed=seed) / 8, random(out, rank, seed=seed + 50) / 8


@dataclass
class Made:
    """A family of two linear layers of one input and a gated MLP, with and without adapters."""

    backend: Backend
    with_adapters: Any
    without: Any


def make(backend: Backend, format: str = "f32") -> Made:
    def prepare(layer: str) -> Prepared:
        return backend.prepare(matrix(random(*SHAPES[layer], seed=len(layer)) / 8, format))

    backend.allocate(ONE_LAYER)
    table, weights = backend.prepare(matrix(TOKENS)), {layer: prepare(layer) for layer in SHAPES}
    slots = {layer: backend.adapter_slots(shape, COUNT, RANK) for layer, shape in SHAPES.items()}
    for number, layers in ADAPTERS.items():
        for layer, (_, scale) in layers.items():
            down, up = (backend.prepare_low_rank(matrix(x)) for x in low_rank(number, layer))
            slots[layer].put(number, down, up, scale)

    def family(ops: Any, w: dict[str, Prepared]) -> Any:
        x = ops.embed(table)
        q, _ = ops.linear(x, w["q"], residual=x), ops.linear(x, w["k"])
        return ops.logit_rows(ops.gated_mlp(q, w["gate"], w["up"], w["down"], "silu", residual=x))

    wrapped = {layer: Adapted(weights[layer], slots[layer]) for layer in SHAPES}
    return Made(
        backend,
        backend.compile(adapted(lambda ops: family(ops, wrapped))),
        backend.compile(lambda ops: family(ops, weights)),
    )


def batch(rows: Sequence[tuple[int, int, int]]) -> StepBatch:
    """rows: (first token id, how many, adapter)."""
    counts = [count for _, count, _ in rows]
    ids = np.concatenate([np.arange(first, first + count) for first, count, _ in rows]).astype(np.int32)
    blocks = np.arange(16, dtype=np.int32)
    return StepBatch(
        ids=ids,
        positions=np.concatenate([np.arange(count) for count in counts]).astype(np.int32),
        query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        kv_len=np.array(counts, np.int32),
        groups=(GroupBatch(np.tile(blocks, (len(rows), 1)), np.arange(len(ids), dtype=np.int64)),),
        logit_index=np.arange(len(ids), dtype=np.int32),
        adapter=np.array([adapter for _, _, adapter in rows], np.int32),
    )


def expected(first: int, count: int, number: int) -> np.ndarray:
    """In float64, with the matrices merged."""
    merged = {}
    for layer, shape in SHAPES.items():
        merged[layer] = random(*shape, seed=len(layer)).astype(np.float64) / 8
        if layer in ADAPTERS.get(number, {}):
            down, up = low_rank(number, layer)
            merged[layer] += ADAPTERS[number][layer][1] * (up.astype(np.float64) @ down)
    x = TOKENS[first : first + count].astype(np.float64)
    q = x @ merged["q"].T + x
    gate = q @ merged["gate"].T
    return x + (gate / (1 + np.exp(-gate)) * (q @ merged["up"].T)) @ merged["down"].T


MIXED = [(0, 1, 1), (1, 3, 0), (4, 5, 2), (9, 1, 3), (10, 1, 3), (11, 270, 1), (281, 2, 0), (283, 7, 3)]


@pytest.mark.parametrize("kind", ["reference", "recording", *kernels()])
def test_every_row_gets_what_its_own_adapter_says(kind: str) -> None:
    backend: Backend = (
        NativeBackend(threads=2, kernels=kind) if kind not in ("reference", "recording") else ReferenceBackend()
    )
    made = make(RecordingBackend(backend) if kind == "recording" else backend)
    out = made.with_adapters.run(batch(MIXED)).rows
    for first, count, number in MIXED:
        np.testing.assert_allclose(out[first : first + count], expected(first, count, number), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("format", ["f32", "bf16"])
@pytest.mark.parametrize("name", kernels())
def test_neighbours_change_no_bit(name: str, format: str) -> None:
    made = make(NativeBackend(threads=2, kernels=name), format)
    together = made.with_adapters.run(batch(MIXED)).rows.copy()
    single = make(NativeBackend(threads=1, kernels=name), format).with_adapters
    for first, count, number in MIXED:
        chunks = [(first, count)] + [(token, 1) for token in range(first, min(first + count, first + 4))]
        for at, size in chunks:
            np.testing.assert_array_equal(together[at : at + size], single.run(batch([(at, size, number)])).rows)
    plain = made.without.run(batch([(first, count, 0) for first, count, _ in MIXED])).rows
    for first, count, number in MIXED:
        assert np.array_equal(plain[first : first + count], together[first : first + count]) == (number == 0)


def test_a_cleared_slot_adds_nothing() -> None:
    backend = ReferenceBackend()
    made = make(backend)
    slots = backend.adapter_slots((4, 4), 1, 4)
    slots.put(1, np.ones((2, 4), np.float32), np.ones((4, 2), np.float32), 1.0)
    slots.clear(1)
    y, x = np.zeros((1, 4), np.float32), np.ones((1, 4), np.float32)
    made.backend.compile(lambda ops: ops.logit_rows(ops.add_low_rank(y, x, slots))).run(batch([(0, 1, 1)]))
    assert not y.any()


@pytest.mark.parametrize("name", kernels()[:1])
def test_numbers_and_matrices_that_do_not_fit_are_refused(name: str) -> None:
    backend = NativeBackend(threads=1, kernels=name)
    made = make(backend)
    for adapter in (-1, COUNT + 1):
        with pytest.raises(ValueError, match="adapter"):
            made.with_adapters.run(batch([(0, 1, adapter)]))
    with pytest.raises(ValueError, match="adapter"):
        made.without.run(batch([(0, 1, 1)]))
    slots = backend.adapter_slots((8, 4), 1, 2)

    def put(number: int, rank: int, out: int = 8) -> None:
        down, up = (backend.prepare_low_rank(matrix(random(*shape))) for shape in ((rank, 4), (out, rank)))
        slots.put(number, down, up, 1.0)

    put(1, 2)
    for arguments in ((0, 2), (2, 2), (1, 3), (1, 2, 9)):
        with pytest.raises(ValueError, match="slots"):
            put(*arguments)


def test_layers_that_adapters_can_reach_are_found() -> None:
    def family(ops: Any) -> Any:
        x = ops.embed("table")
        q = ops.linear(x, "q", "bias", residual=x)
        return ops.logits(ops.gated_mlp(q, "gate", "up", "down", "silu"), "head")

    assert linear_layers(family) == ["q", "gate", "up", "down"]
