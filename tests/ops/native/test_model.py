"""Whole models on the native backend: the reference's logits, and the same bits alone, batched, chunked and reused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from headway.model.load import Model, load
from headway.model.source import DEFAULT_MODEL, resolve
from headway.ops import native
from headway.ops.native.backend import NativeBackend
from headway.ops.protocol import Backend
from headway.ops.reference import ReferenceBackend
from tests.model.checkpoints import FAMILIES, IN_GGUF, Q4_K_M, VARIANTS, make, prompt, to_gguf
from tests.model.paging import Bench
from tests.ops.native.harness import kernels

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))


def bench(path: Path, backend: Backend, **sizes: int) -> Bench:
    return Bench(load(path, backend), backend, **sizes)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def divergence(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """KL(want || got) at every position."""
    p, q = log_softmax(want), log_softmax(got)
    return (np.exp(p) * (p - q)).sum(axis=-1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_weights_and_cache_give_the_references_logits(tmp_path: Path, variant: str) -> None:
    make(tmp_path, **VARIANTS[variant])
    mine, theirs = bench(tmp_path, NativeBackend(kv_dtype="f32")), bench(tmp_path, ReferenceBackend())
    for work in ({"a": prompt(40), "b": prompt(3)}, {"a": [5]}, {"b": prompt(30), "c": prompt(9)}):
        np.testing.assert_allclose(mine.step(work), theirs.step(work), rtol=0, atol=2e-4)


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize(
    ("variant", "format"),
    [("grouped", format) for format in ("Q8_0", "Q4_0", "Q4_1", "BF16", "F16", "F32")]
    + [(family, "BF16") for family in FAMILIES if family in IN_GGUF],
)
def test_a_sequence_is_the_same_bits_alone_batched_chunked_and_over_used_blocks(
    tmp_path: Path, variant: str, format: str, kernel: str
) -> None:
    make(tmp_path, **IN_GGUF[variant])
    to_gguf(tmp_path, tmp_path / "model.gguf", format)
    runner = bench(tmp_path / "model.gguf", NativeBackend(threads=2, kernels=kernel), blocks=128)
    ids = prompt(48)
    whole = runner.step({"whole": ids})
    assert np.isfinite(whole).all()
    for chunk in (1, 2, 3, 5, 16, 47):
        runner.free += runner.tables.pop(f"chunks of {chunk}", [])
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            work = {f"chunks of {chunk}": part, f"neighbour {chunk}": prompt(1 + start % 3, seed=start)}
            got = runner.step(work)
            np.testing.assert_array_equal(got[: len(part)], whole[start : start + len(part)])
        for name in (f"chunks of {chunk}", f"neighbour {chunk}"):
            runner.free += runner.tables.pop(name)
            del runner.length[name]


@pytest.mark.parametrize(
    ("kind", "mixed"), [("Q4_K", Q4_K_M), ("Q2_K", {}), ("Q3_K", {}), ("Q5_K", {}), ("Q6_K", {}), ("Q5_1", {})]
)
def test_a_k_quant_file_generates_what_its_dequantised_reference_does(
    tmp_path: Path, kind: str, mixed: dict[str, str]
) -> None:
    make(tmp_path, hidden_size=256, intermediate_size=512, head_dim=64)
    to_gguf(tmp_path, tmp_path / "model.gguf", kind, mixed)
    mine = bench(tmp_path / "model.gguf", NativeBackend(kv_dtype="f32"))
    theirs = bench(tmp_path / "model.gguf", ReferenceBackend())
    got, want = mine.step({"a": prompt(40)}), theirs.step({"a": prompt(40)})
    assert divergence(got, want).mean() < 0.01
    best = np.sort(want, axis=-1)
    clear = best[:, -1] - best[:, -2] > 0.3  # the rest may go either way after rounding activations to 8 bits
    assert clear.sum() > 10
    np.testing.assert_array_equal(got.argmax(-1)[clear], want.argmax(-1)[clear])


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def demo(path: Path) -> tuple[NativeBackend, Model]:
    backend = NativeBackend()
    return backend, load(path, backend)


def test_the_demo_model_differs_from_the_reference_only_by_activation_rounding(
    path: Path, demo: tuple[NativeBackend, Model]
) -> None:
    backend, model = demo
    mine, theirs = Bench(model, backend, block_size=32), bench(path, ReferenceBackend(), block_size=32)
    ids = prompt(96, vocab=20000, seed=3)
    got, want = mine.step({"a": ids}), theirs.step({"a": ids})
    assert divergence(got, want).mean() < 0.01
    assert (got.argmax(-1) == want.argmax(-1)).mean() > 0.85


def test_the_demo_model_is_the_same_bits_however_a_prompt_is_cut(demo: tuple[NativeBackend, Model]) -> None:
    backend, model = demo
    runner = Bench(model, backend, block_size=32)
    ids = prompt(300, vocab=20000, seed=4)
    whole = runner.step({"whole": ids}, "last")
    for chunk in (7, 128, 299):
        name = f"chunks of {chunk}"
        for start in range(0, len(ids), chunk):
            got = runner.step({name: ids[start : start + chunk], "other": [start]}, "last")
        np.testing.assert_array_equal(got[0], whole[0])
        runner.free += runner.tables.pop(name)
