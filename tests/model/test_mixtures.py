"""Families with experts or latent attention give transformers' logits on both backends, however a prompt is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from headway.core.errors import ModelFileError
from headway.measure.trial import Point, Trial
from headway.model.load import load
from headway.ops import native
from headway.ops.native.backend import NativeBackend
from headway.ops.recording import RecordingBackend
from headway.ops.reference import ReferenceBackend
from headway.roofline.hardware import find_hardware
from headway.roofline.step import StepTime
from headway.roofline.work import experts_touched
from headway.shape.config import shape_from_config
from headway.shape.model import kv_bytes_per_token
from tests.model.checkpoints import logits, make, prompt
from tests.model.mixtures import MIXTURES
from tests.model.paging import Bench

needs_native = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
CLOSE = {"rtol": 0, "atol": 1e-4}


def logprobs(rows: np.ndarray, ids: list[int]) -> np.ndarray:
    """Of the prompt's tokens but the first."""
    rows = rows - rows.max(axis=1, keepdims=True)
    rows = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
    return rows[np.arange(len(ids) - 1), ids[1:]]


def chunks(runner: Bench, name: str, ids: list[int], size: int) -> np.ndarray:
    return np.concatenate([runner.step({name: ids[at : at + size]}) for at in range(0, len(ids), size)])


@pytest.mark.parametrize("name", MIXTURES)
def test_they_equal_transformers_on_both_backends(tmp_path: Path, name: str) -> None:
    theirs = make(tmp_path, **MIXTURES[name])
    reference = ReferenceBackend(poison=True)
    model = load(tmp_path, reference)
    runner = Bench(model, reference, blocks=160)
    tall = NativeBackend(threads=2) if native.available() else None
    quick = Bench(load(tmp_path, tall), tall, blocks=160) if tall is not None else None
    for length in (40, 150):
        ids = prompt(length, seed=length)
        expected = logits(theirs, ids)
        np.testing.assert_allclose(runner.step({f"whole {length}": ids}), expected, **CLOSE)
        np.testing.assert_allclose(chunks(runner, f"cut {length}", ids, 32), expected, **CLOSE)
        if quick is not None:
            difference = logprobs(quick.step({f"{length}": ids}), ids) - logprobs(expected, ids)
            assert np.abs(difference).mean() < 0.08  # a cache of 16 bits sends some rows to other experts
    planned = shape_from_config(json.loads((tmp_path / "config.json").read_text()))
    buffers = sum(buffer.numel() for name, buffer in theirs.named_buffers() if "correction" in name)
    assert planned.params == model.shape.params
    assert planned.params.total == sum(p.numel() for p in theirs.parameters()) + buffers == model.info.parameters
    assert len(runner.program.experts) == (planned.moe.layers if planned.moe else 0)


@needs_native
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("weights", ["stored", "int8"])
def test_the_same_bits_cold_warm_batched_and_chunked(tmp_path: Path, name: str, weights: str) -> None:
    make(tmp_path, **MIXTURES[name])
    backend = NativeBackend(threads=2, weights=weights)
    runner = Bench(load(tmp_path, backend), backend, blocks=400)
    ids, other = prompt(90, seed=1), prompt(30, seed=2)
    cold = runner.step({"cold": ids})
    np.testing.assert_array_equal(runner.step({"warm": ids}), cold)
    np.testing.assert_array_equal(chunks(runner, "chunked", ids, 17), cold)
    np.testing.assert_array_equal(runner.step({"first": other, "batched": ids})[len(other) :], cold)
    runner.step({"decoded": ids[:80], "busy": other})
    for at in range(80, 90):
        step = {"busy": [at % 7], "decoded": [ids[at]]} if at % 2 else {"decoded": [ids[at]]}
        np.testing.assert_array_equal(runner.step(step)[-1], cold[at])


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v2"])
def test_recorded_once_and_replayed_it_equals_eager(tmp_path: Path, name: str) -> None:
    make(tmp_path, **MIXTURES[name])
    eager, recording = ReferenceBackend(), RecordingBackend(ReferenceBackend())
    plain, replayed = (Bench(load(tmp_path, backend), backend) for backend in (eager, recording))
    for work in ({"a": prompt(5)}, {"a": [3], "b": prompt(17)}, {"a": [4], "b": [5], "c": [6]}):
        np.testing.assert_array_equal(plain.step(work), replayed.step(work))
    assert recording.recorded == 1


def test_a_latent_cache_takes_its_vector_and_its_rotary_key(tmp_path: Path) -> None:
    make(tmp_path, **MIXTURES["deepseek_v3"])
    for backend in (ReferenceBackend(), *([NativeBackend(threads=1)] if native.available() else [])):
        model = load(tmp_path, backend)
        (group,) = model.shape.groups
        assert group.kind == "latent"
        numbers = 3 * (36 + 8)  # layers, latent vector, rotary key
        assert kv_bytes_per_token(model.shape) == numbers * backend.kv_dtype_bytes
        assert backend.block_bytes(group, 32) == 32 * numbers * backend.kv_dtype_bytes


def test_a_step_says_how_many_experts_it_touched_and_is_priced_by_them(tmp_path: Path) -> None:
    make(tmp_path, **MIXTURES["qwen2_moe listed"])
    backend = ReferenceBackend()
    model = load(tmp_path, backend)
    point = Point(rows=1, context=4)
    trial = Trial(backend, model.forward, model.shape, [point])
    size, _ = trial.run(point)
    assert size.experts == 2.0  # one row goes to two experts of each layer that has six
    time = StepTime(model.shape, find_hardware("h100-sxm"))
    even, skewed = (time.work(msgspec.structs.replace(size, tokens=8, experts=seen)) for seen in (None, 2.0))
    assert skewed.bytes[1] == pytest.approx(even.bytes[1] * 2.0 / experts_touched(6, 2, 8))


def rewritten(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    save_file({name: np.ascontiguousarray(x) for name, x in change(load_file(path)).items()}, path)


def fused(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """As transformers 5 holds experts: gates and what they gate in one tensor for all experts, under `mlp`."""
    out, experts = {}, {}
    for name, x in tensors.items():
        name = name.replace("block_sparse_moe", "mlp")
        layer, found, rest = name.partition("mlp.experts.")
        if found:
            number, role = rest.split(".")[:2]
            experts.setdefault(layer + found, {}).setdefault(int(number), {})[role] = x
        else:
            out[name] = x
    for at, matrices in experts.items():
        ordered = [matrices[number] for number in sorted(matrices)]
        out[at + "gate_up_proj"] = np.stack([np.concatenate([m["w1"], m["w3"]]) for m in ordered])
        out[at + "down_proj"] = np.stack([m["w2"] for m in ordered])
    return out


def test_experts_in_one_tensor_are_the_same_model(tmp_path: Path) -> None:
    theirs = make(tmp_path, **MIXTURES["mixtral"])
    rewritten(tmp_path, fused)
    backend, ids = ReferenceBackend(), prompt(20)
    np.testing.assert_allclose(Bench(load(tmp_path, backend), backend).step({"a": ids}), logits(theirs, ids), **CLOSE)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def test_gpt_oss_with_mxfp4_experts_equals_its_dequantised_self(tmp_path: Path) -> None:
    theirs = make(tmp_path, **MIXTURES["gpt_oss"])
    rng, packed = np.random.default_rng(0), dict[str, np.ndarray]()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith(("gate_up_proj", "down_proj")):
                count, inputs, out = parameter.shape
                blocks = rng.integers(0, 256, (count, out, inputs // 32, 16), dtype=np.uint8)
                scales = rng.integers(121, 125, blocks.shape[:-1], dtype=np.uint8)
                values = E2M1[np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)]
                values = values * np.ldexp(np.float32(1), scales.astype(int) - 127)[..., None]
                parameter.copy_(torch.from_numpy(values.reshape(count, out, inputs)).transpose(1, 2))
                packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    rewritten(
        tmp_path,
        lambda t: {name: x for name, x in t.items() if not name.endswith(("gate_up_proj", "down_proj"))} | packed,
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}))
    ids = prompt(40)
    expected, backend = logits(theirs, ids), ReferenceBackend()
    np.testing.assert_allclose(Bench(load(tmp_path, backend), backend).step({"a": ids}), expected, rtol=0, atol=5e-4)
    if native.available():
        quick = NativeBackend(threads=2)
        got = Bench(load(tmp_path, quick), quick).step({"a": ids})
        assert np.abs(logprobs(got, ids) - logprobs(expected, ids)).mean() < 0.08


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: {name: x for name, x in t.items() if ".1.block_sparse_moe.experts.2.w1" not in name}, "expert 2"),
        (lambda t: {name: x[:, :-1] if "experts.3.w2" in name else x for name, x in t.items()}, "alike"),
        (lambda t: {name: x for name, x in t.items() if "experts.4." not in name}, "the config asks for"),
    ],
)
def test_experts_that_are_missing_or_unlike_are_named(tmp_path: Path, change: Any, said: str) -> None:
    make(tmp_path, **MIXTURES["mixtral"])
    rewritten(tmp_path, change)
    with pytest.raises(ModelFileError, match=said):
        load(tmp_path, ReferenceBackend())


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("qwen3_moe", "num_experts_per_tok", 7), ("deepseek_v3", "n_group", 3), ("deepseek_v3", "scoring_func", "tanh"),
        ("deepseek_v2", "topk_method", "random"), ("deepseek_v2", "first_k_dense_replace", -1),
        ("qwen2_moe", "mlp_only_layers", "all"), ("deepseek_v2", "kv_lora_rank", 1 << 40),
    ],
)  # fmt: skip
def test_what_a_config_cannot_mean_is_refused(tmp_path: Path, name: str, field: str, value: Any) -> None:
    make(tmp_path, **MIXTURES[name])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ModelFileError, match=field):
        load(tmp_path, ReferenceBackend())
