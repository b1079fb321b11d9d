"""Latent attention on every instruction set: against the reference, and bit by bit however a sequence is cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from headway.ops.native.backend import NativeBackend
from headway.ops.protocol import Backend, CacheLayout, GroupBatch, Rope, StepBatch
from headway.ops.reference import ReferenceBackend
from headway.ops.weight import stack
from headway.shape.model import KVGroup, block_bytes
from tests.ops.native.harness import kernels, matrix, random, vector

HEADS, PLAIN, TURNED, RANK, VALUE, TOKENS = 3, 20, 8, 36, 12, 300
GROUP = KVGroup("latent", (0,), 1, TURNED, RANK)
LAYOUT = CacheLayout((GROUP,), (24,), 16)


class Attention:
    """One layer over a table of made-up queries and latents; a token's id is its row."""

    def __init__(self, backend: Backend, format: str = "f32", interleaved: bool = True) -> None:
        turn = Rope(tuple(100.0 ** (-pair / 4) for pair in range(TURNED // 2)), interleaved, 1.1)
        wide = HEADS * (PLAIN + TURNED)
        q, latent = (random(TOKENS, n, seed=n) for n in (wide, RANK + TURNED))
        table = backend.prepare(matrix(np.concatenate([q, latent], axis=1)))
        pick = np.eye(wide + RANK + TURNED, dtype=np.float32)
        pick_q, pick_latent = backend.prepare(matrix(pick[:wide])), backend.prepare(matrix(pick[wide:]))
        norm = backend.prepare(vector(random(RANK, seed=1)))
        up = [
            backend.prepare(stack("up", tuple(matrix(random(*shape, seed=i), format) for i in range(HEADS))))
            for shape in ((RANK, PLAIN), (VALUE, RANK))
        ]

        def forward(ops: Any) -> Any:
            x = ops.embed(table)
            q, latent = ops.linear(x, pick_q), ops.linear(x, pick_latent)
            return ops.logit_rows(ops.latent_attention(q, latent, norm, *up, 0, 0.2, turn, 1e-6))

        backend.allocate(LAYOUT)
        self.program = backend.compile(forward)

    def step(self, rows: list[tuple[int, int, int]]) -> np.ndarray:
        """rows: (number of the sequence, first position, end); token p of each is table row p."""
        ids = np.concatenate([np.arange(first, end) for _, first, end in rows]).astype(np.int32)
        counts = [end - first for _, first, end in rows]
        tables = np.array([[1 + (sequence * 7 + 5 * j) % 22 for j in range(20)] for sequence, _, _ in rows], np.int32)
        of = np.repeat(np.arange(len(rows)), counts)
        slots = tables[of, ids // 16].astype(np.int64) * 16 + ids % 16
        start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return self.program.run(
            StepBatch(
                ids, ids, start, np.array([end for _, _, end in rows], np.int32), (GroupBatch(tables, slots),),
                np.arange(len(ids), dtype=np.int32), np.zeros(len(rows), np.int32),
            )
        ).rows.copy()  # fmt: skip


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("interleaved", [True, False])
def test_it_equals_the_reference(kernel: str, interleaved: bool) -> None:
    expected = Attention(ReferenceBackend(poison=True), interleaved=interleaved).step([(0, 0, TOKENS)])
    exact = Attention(NativeBackend(threads=2, kernels=kernel, kv_dtype="f32"), interleaved=interleaved)
    np.testing.assert_allclose(exact.step([(0, 0, TOKENS)]), expected, rtol=0, atol=2e-4 * np.abs(expected).max())
    short = Attention(NativeBackend(threads=2, kernels=kernel), "bf16", interleaved).step([(0, 0, TOKENS)])
    assert np.abs(short - expected).mean() < 0.02 * np.abs(expected).mean()


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("kv", ["bf16", "f32", "int8"])
@pytest.mark.parametrize("format", ["bf16", "f32"])
def test_the_same_bits_whole_chunked_and_token_by_token(kernel: str, kv: str, format: str) -> None:
    attention = Attention(NativeBackend(threads=2, kernels=kernel, kv_dtype=kv), format)
    whole = attention.step([(0, 0, TOKENS)])
    cuts = [0, 1, 33, 40, 260, 288]
    chunks = [attention.step([(0, first, end)]) for first, end in pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(chunks), whole[: cuts[-1]])
    for position in range(288, TOKENS):
        np.testing.assert_array_equal(attention.step([(0, position, position + 1)])[0], whole[position])


def test_a_token_takes_what_the_memory_plan_says() -> None:
    wide = KVGroup("latent", (0, 1, 2), 1, 64, 512)
    assert NativeBackend(threads=1).block_bytes(wide, 32) == block_bytes(wide, 32) == 3 * 32 * (512 + 64) * 2
    assert ReferenceBackend().block_bytes(wide, 32) == block_bytes(wide, 32)
