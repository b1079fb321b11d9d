"""Runs single operations on the native backend, by way of one-line families; and the formulas they must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from headway.core.errors import BadInput
from headway.ops import native
from headway.ops.native.backend import NativeBackend
from headway.ops.protocol import Backend, CacheLayout, GroupBatch, StepBatch
from headway.ops.weight import Weight
from headway.shape.formats import FORMATS
from headway.shape.model import KVGroup

ONE_LAYER = CacheLayout((KVGroup("full", (0,), 1, 2, 2),), (16,), 32)


def kernels() -> list[str]:
    """Every table of kernels this machine runs; one skipped entry if the module was not built."""
    if not native.available():
        return [pytest.param("", marks=pytest.mark.skip(reason=str(native.why_not())))]  # type: ignore[list-item]
    found = []
    for name in ("avx512_bf16", "avx512", "avx2", "scalar"):
        try:
            NativeBackend(threads=1, kernels=name)
        except BadInput:
            continue
        found.append(name)
    return found


def vector(x: np.ndarray) -> Weight:
    return Weight("vector", x.shape, "f32", np.ascontiguousarray(x, np.float32).view(np.uint8).reshape(-1))


def matrix(x: np.ndarray, format: str = "f32", name: str = "matrix") -> Weight:
    """A 16 or 32-bit weight holding x rounded to the format."""
    x = np.ascontiguousarray(x, np.float32)
    if format == "bf16":
        bits = x.view(np.uint32).astype(np.uint64)
        stored: np.ndarray = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    else:
        stored = x if format == "f32" else x.astype(np.float16)
    return Weight(name, x.shape, format, stored.view(np.uint8).reshape(-1))


# Where a block's float16 factors lie.
FACTORS = dict.fromkeys(("q4_1", "q5_1", "q4_k", "q5_k"), (0, 2)) | {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,)}


def unchecked(backend: Backend, x: np.ndarray) -> Any:
    """A prepared float32 matrix that may hold what `prepare` refuses: infinities and NaN."""
    if not isinstance(backend, NativeBackend):
        return x
    return backend._engine.pack([matrix(x).data], "f32", *x.shape)


def blocks(out: int, inputs: int, format: str, seed: int = 0, spread: tuple[int, int] = (-12, 2)) -> Weight:
    """A weight of a block format with every possible code, and factors of both signs and many sizes: N(0, 1) times
    powers of two of `spread`."""
    rng = np.random.default_rng(seed)
    numbers, size = FORMATS[format].numbers, FORMATS[format].bytes
    data = rng.integers(0, 256, (out * inputs // numbers, size), dtype=np.uint8)
    if format == "mxfp4":  # a power of two in one byte
        data[:, 0] = 127 + rng.integers(*spread, len(data))
        return Weight("blocks", (out, inputs), format, data.reshape(-1))
    for byte in FACTORS.get(format, (0,)):
        factor = (rng.standard_normal(len(data)) * 2.0 ** rng.integers(*spread, len(data))).astype(np.float16)
        data[:, byte : byte + 2] = factor.view(np.uint8).reshape(-1, 2)
    return Weight("blocks", (out, inputs), format, data.reshape(-1))


def step(tokens: int, logit_index: Sequence[int] | None = None) -> StepBatch:
    """One row at position 0."""
    return StepBatch(
        ids=np.arange(tokens, dtype=np.int32),
        positions=np.arange(tokens, dtype=np.int32),
        query_start=np.array([0, tokens], np.int32),
        kv_len=np.array([tokens], np.int32),
        groups=(GroupBatch(np.arange(16, dtype=np.int32)[None], np.arange(tokens, dtype=np.int64)),),
        logit_index=np.arange(tokens, dtype=np.int32) if logit_index is None else np.array(logit_index, np.int32),
        adapter=np.zeros(1, np.int32),
    )


def run(
    backend: NativeBackend, x: np.ndarray, family: Callable[[Any, Any], Any], rows: Sequence[int] | None = None
) -> np.ndarray:
    """family(ops, handle of x [tokens, width]) -> its value for each token, or for the rows named."""
    tokens = list(range(len(x))) if rows is None else list(rows)
    table = unchecked(NativeBackend(threads=1, kernels="scalar"), x)
    backend.allocate(ONE_LAYER)
    program = backend.compile(lambda ops: ops.logit_rows(family(ops, ops.embed(table))))
    batch = step(len(tokens))
    batch.ids[:] = tokens
    return program.run(batch).rows.copy()


def quantised(x: np.ndarray, group: int) -> np.ndarray:
    """What a row of activations becomes when it meets integer weights: 8 bits per token and group."""
    out = np.zeros_like(x, dtype=np.float64)
    for start in range(0, x.shape[1], group):
        part = x[:, start : start + group].astype(np.float32)
        largest = np.abs(part).max(axis=1, keepdims=True)
        scale = largest / np.float32(127)
        by = np.divide(np.float32(127), largest, out=np.zeros_like(scale), where=largest >= 1e-35)
        out[:, start : start + group] = np.rint(part * by).astype(np.float64) * scale
    return out


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
