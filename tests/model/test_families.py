"""Every family gives transformers' logits, however its file is stored and however the step is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway.model.load import describe, load
from headway.ops.recording import RecordingBackend
from headway.ops.reference import ReferenceBackend
from headway.shape.config import shape_from_config
from tests.model.checkpoints import FAMILIES, IN_GGUF, VARIANTS, logits, make, prompt, to_gguf
from tests.model.paging import Bench

CLOSE = {"rtol": 0, "atol": 1e-4}


def bench(path: Path) -> Bench:
    backend = ReferenceBackend(poison=True)
    return Bench(load(path, backend), backend)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers_whole_chunked_and_token_by_token(tmp_path: Path, variant: str) -> None:
    theirs, runner = make(tmp_path, **VARIANTS[variant]), bench(tmp_path)
    for length in (1, 2, 7, 33, 150):
        ids = prompt(length, seed=length)
        expected = logits(theirs, ids)
        cuts = {"whole": [length], "chunks": [5] * (length // 5) + [length % 5], "tokens": [1] * length}
        for how, sizes in cuts.items():
            if how == "tokens" and length > 40:
                continue
            parts, start = [], 0
            runner.known[f"{length} {how}"] = length
            for size in filter(None, sizes):
                parts.append(runner.step({f"{length} {how}": ids[start : start + size]}))
                start += size
            np.testing.assert_allclose(np.concatenate(parts), expected, **CLOSE, err_msg=f"{length} {how}")
            runner.free += runner.tables.pop(f"{length} {how}")  # stale blocks are reused by the next sequence


def test_rows_of_one_step_do_not_see_each_other(tmp_path: Path) -> None:
    theirs, runner = make(tmp_path), bench(tmp_path)
    texts = {f"row {n}": prompt(n, seed=n) for n in (3, 9, 20, 21, 40)}
    done = dict.fromkeys(texts, 0)
    seen: dict[str, list[np.ndarray]] = {name: [] for name in texts}
    rng = np.random.default_rng(0)
    while any(done[name] < len(ids) for name, ids in texts.items()):
        work = {}
        for name, ids in texts.items():
            if rng.random() < 0.7 and done[name] < len(ids):
                work[name] = ids[done[name] : done[name] + int(rng.choice([1, 1, 4, 18]))]
        if work:
            parts = np.split(runner.step(work), np.cumsum([len(ids) for ids in work.values()])[:-1])
            for name, part in zip(work, parts, strict=True):
                seen[name].append(part)
                done[name] += len(part)
    for name, ids in texts.items():
        np.testing.assert_allclose(np.concatenate(seen[name]), logits(theirs, ids), **CLOSE, err_msg=name)


@pytest.mark.parametrize(
    "storage",
    [
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16},
        {"shard": "40KB"},
        {"shard": "40KB", "dtype": torch.bfloat16},
    ],
    ids=["bf16", "f16", "sharded", "sharded bf16"],
)
def test_every_safetensors_storage_gives_the_same_logits(tmp_path: Path, storage: dict[str, Any]) -> None:
    theirs = make(tmp_path, **storage)
    assert (tmp_path / "model.safetensors.index.json").exists() == ("shard" in storage)
    ids = prompt(20)
    np.testing.assert_allclose(bench(tmp_path).step({"a": ids}), logits(theirs, ids), **CLOSE)


@pytest.mark.parametrize("variant", IN_GGUF)
def test_a_gguf_of_the_same_weights_gives_the_same_logits(tmp_path: Path, variant: str) -> None:
    theirs = make(tmp_path, **IN_GGUF[variant])
    to_gguf(tmp_path, tmp_path / "m.gguf")
    ids = prompt(150)
    np.testing.assert_allclose(bench(tmp_path / "m.gguf").step({"a": ids}), logits(theirs, ids), **CLOSE)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_every_gguf_storage_gives_the_logits_of_its_dequantised_weights(tmp_path: Path, kind: str) -> None:
    theirs = make(tmp_path)
    to_gguf(tmp_path, tmp_path / "m.gguf", kind)
    model = load(tmp_path / "m.gguf", ReferenceBackend())
    assert model.info.formats == {kind.lower(): 16, "f32": 5}
    import gguf

    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 2:
                stored = gguf.GGMLQuantizationType[kind]
                parameter.copy_(
                    torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(parameter.numpy(), stored), stored))
                )
    ids = prompt(20)
    np.testing.assert_allclose(bench(tmp_path / "m.gguf").step({"a": ids}), logits(theirs, ids), **CLOSE)


@pytest.mark.parametrize("variant", ["grouped", "tied", "llama3 rope", "biases", *FAMILIES])
def test_recorded_once_and_replayed_at_five_other_batch_shapes_it_equals_eager(tmp_path: Path, variant: str) -> None:
    make(tmp_path, **VARIANTS[variant])
    eager, recording = ReferenceBackend(), RecordingBackend(ReferenceBackend())
    plain, replayed = (Bench(load(tmp_path, backend), backend) for backend in (eager, recording))
    steps: list[tuple[dict[str, list[int]], str]] = [
        ({"a": prompt(5)}, "all"),
        ({"a": [3], "b": prompt(17)}, "last"),
        ({"a": [4], "b": [5], "c": [6]}, "all"),
        ({"c": prompt(30)}, "last"),
        ({"d": prompt(2), "a": prompt(3), "b": [1]}, "all"),
        ({"d": [9]}, "last"),
    ]
    for work, wanted in steps:
        np.testing.assert_array_equal(plain.step(work, wanted), replayed.step(work, wanted))
    assert recording.recorded == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_planner_counts_the_same_parameters_from_the_config_alone(tmp_path: Path, variant: str) -> None:
    theirs = make(tmp_path, **VARIANTS[variant])
    planned = shape_from_config(json.loads((tmp_path / "config.json").read_text()))
    loaded = load(tmp_path, ReferenceBackend())
    assert (loaded.shape.params, loaded.shape.head_width) == (planned.params, planned.head_width)
    counted = sum(parameter.numel() for parameter in theirs.parameters())
    assert planned.n_params == loaded.info.parameters == counted


def test_a_description_needs_no_backend(tmp_path: Path) -> None:
    theirs = make(tmp_path, dtype=torch.bfloat16, tie_word_embeddings=True)
    info = describe(tmp_path)
    assert info.parameters == sum(p.numel() for p in theirs.parameters())
    assert info.weight_bytes == 2 * info.parameters
    assert (info.config.layers, info.vocab_size, info.context_length, info.tokenizer.eos_ids) == (2, 160, 256, (2,))
    (group,) = load(tmp_path, ReferenceBackend()).shape.groups
    assert (group.kind, group.layers, group.heads, group.key_width, group.dtype_bytes) == ("full", (0, 1), 2, 16, 4.0)
