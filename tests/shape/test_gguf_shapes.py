"""A shape from a GGUF header, and the machine's own profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import BadInput
from headway.measure.probe import measure_knee, read_bandwidth, save_profile
from headway.roofline.profile import Profile, device_of, load_profile
from headway.shape.catalogue import find_model
from headway.shape.gguf import part_of, shape_from_gguf
from headway.shape.model import kv_bytes_per_token


def header(layers: int = 2, **changes: Any) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], str]]]:
    """A small Llama as llama.cpp writes it: Q4_K matrices, a Q6_K head, float32 norms."""
    metadata = {
        "general.architecture": "llama", "llama.block_count": layers, "llama.embedding_length": 64,
        "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.context_length": 2048,
    } | changes  # fmt: skip
    tensors: dict[str, tuple[tuple[int, ...], str]] = {
        "token_embd.weight": ((256, 64), "q4_k"), "output.weight": ((256, 64), "q6_k"),
        "output_norm.weight": ((64,), "f32"),
    }  # fmt: skip
    for layer in range(layers):
        at = f"blk.{layer}."
        tensors |= {
            at + "attn_norm.weight": ((64,), "f32"), at + "ffn_norm.weight": ((64,), "f32"),
            at + "attn_q.weight": ((64, 64), "q4_k"), at + "attn_k.weight": ((32, 64), "q4_k"),
            at + "attn_v.weight": ((32, 64), "q6_k"), at + "attn_output.weight": ((64, 64), "q4_k"),
            at + "ffn_gate.weight": ((128, 64), "q4_k"), at + "ffn_up.weight": ((128, 64), "q4_k"),
            at + "ffn_down.weight": ((64, 128), "q4_k"),
        }  # fmt: skip
    return metadata, tensors


def test_parameters_and_bytes_are_summed_over_the_tensors_in_their_own_types() -> None:
    shape = shape_from_gguf(*header())
    assert shape.params.attention == 2 * (64 * 64 * 2 + 32 * 64 * 2)
    assert shape.params.mlp == 2 * 3 * 128 * 64
    assert shape.stored.mlp == shape.params.mlp * 144 / 256
    assert shape.stored.head == 256 * 64 * 210 / 256
    assert shape.stored.norm == 5 * 64 * 4
    assert (shape.weight_format, shape.tied, shape.vocab, shape.context) == ("q4_k", False, 256, 2048)
    assert kv_bytes_per_token(shape) == 2 * 2 * 2 * 16 * 2


def test_windows_experts_and_latent_caches() -> None:
    gemma, tensors = header(layers=6)
    gemma = {key.replace("llama.", "gemma3."): value for key, value in gemma.items()}
    gemma |= {"general.architecture": "gemma3", "gemma3.attention.sliding_window": 512}
    window, full = shape_from_gguf(gemma, tensors).groups
    assert (window.window, len(window.layers), full.layers) == (512, 5, (5,))
    metadata, tensors = header(**{"llama.expert_count": 8, "llama.expert_used_count": 2})
    for layer in range(2):
        for name, size in (("gate", (8, 48, 64)), ("up", (8, 48, 64)), ("down", (8, 64, 48))):
            tensors[f"blk.{layer}.ffn_{name}_exps.weight"] = (size, "q4_k")
    moe = shape_from_gguf(metadata, tensors).moe
    assert moe is not None
    assert (moe.layers, moe.experts, moe.active, moe.expert_params) == (2, 8, 2, 3 * 48 * 64)


@pytest.mark.parametrize(
    ("name", "part"),
    [("blk.0.ffn_gate_inp.weight", "router"), ("blk.0.ffn_up_shexp.weight", "shared"),
     ("blk.3.attn_q_norm.weight", "norm"),
     ("output_norm.weight", "norm"), ("blk.0.ffn_down.weight", "mlp"), ("blk.0.attn_kv_a_mqa.weight", "attention")],
)  # fmt: skip
def test_parts(name: str, part: str) -> None:
    assert part_of(name) == part


BAD = {
    "no architecture": ({"general.architecture": None}, {}, "general.architecture: missing"),
    "no layers": ({"llama.block_count": 0}, {}, "llama.block_count: 0"),
    "recurrent": ({"llama.ssm.conv_kernel": 4}, {}, "recurrent layers"),
    "unknown type": ({}, {"blk.0.x": ((4,), "q9_z")}, "stored as q9_z"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_other_headers_are_refused(name: str) -> None:
    keys, tensors, sentence = BAD[name]
    metadata, known = header(**keys)
    with pytest.raises(BadInput, match=sentence):
        shape_from_gguf(metadata, known | tensors)


def test_the_builtin_model_has_the_same_shape_by_name() -> None:
    assert find_model("smollm2-135m").n_params == 134_515_008  # as its GGUF header says, tied head counted once


def test_a_profile_is_a_device(tmp_path: Path) -> None:
    profile = Profile("box", "2026-01-01", 2, 8e9, {"1": 10e9, "2": 18e9}, {"fp32": 100e9})
    path = tmp_path / "deep" / "profile.json"
    save_profile(profile, path)
    assert load_profile(path) == profile
    device = device_of(profile)
    assert (device.bandwidth, device.peak("fp32"), device.usable) == (18e9, 100e9, 8e9)
    path.write_text("{}")
    with pytest.raises(BadInput, match="not a profile"):
        load_profile(path)
    with pytest.raises(BadInput, match="headway probe"):
        load_profile(tmp_path / "missing.json")


def test_probes_measure_something() -> None:
    assert read_bandwidth(1, 1 << 22) > 1e6
    found = measure_knee(64, (1, 8))
    assert [point.batch for point in found.points] == [1, 8]
    assert found.batch == pytest.approx(found.weight_seconds / found.row_seconds)
    with pytest.raises(BadInput, match="--batches"):
        measure_knee(64, (0,))
