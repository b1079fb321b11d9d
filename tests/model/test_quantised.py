"""Checkpoints of every packed kind equal the same numbers stored as floats, tensor by tensor and in their logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.core.errors import ModelFileError
from headway.model.checkpoint import open_checkpoint
from headway.model.load import load
from headway.ops import native
from headway.ops.native.backend import NativeBackend
from headway.ops.reference import ReferenceBackend
from tests.model.checkpoints import make, prompt
from tests.model.paging import Bench

GROUP = 32
Packed = tuple[dict[str, torch.Tensor], torch.Tensor]  # tensors of a layer by the end of their name, its floats


def words(codes: torch.Tensor, bits: int, axis: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Codes packed along an axis into int32, the lowest bits first. order: which of a word's codes comes where."""
    each = 32 // bits
    codes = codes.movedim(axis, -1).reshape(*codes.movedim(axis, -1).shape[:-1], -1, each).to(torch.int64)
    total = sum(codes[..., code] << bits * place for place, code in enumerate(order or range(each)))
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32).movedim(-1, axis).contiguous()


def drawn(out: int, inputs: int, bits: int, symmetric: bool, seed: int) -> tuple[torch.Tensor, ...]:
    """codes [in, out], zero points and scales [groups, out]."""
    draw = torch.Generator().manual_seed(seed)
    groups = inputs // GROUP
    codes = torch.randint(0, 2**bits, (inputs, out), generator=draw)
    zeros = torch.full((groups, out), 2 ** (bits - 1))
    if not symmetric:
        zeros = torch.randint(1, 2**bits, (groups, out), generator=draw)
    return codes, zeros, (torch.rand((groups, out), generator=draw) * 0.2 / 2**bits + 0.01 / 2**bits).half()


def gptq(bits: int = 4, symmetric: bool = True, shuffled: bool = False, v2: bool = False) -> Callable[..., Packed]:
    def pack(out: int, inputs: int, seed: int) -> Packed:
        codes, zeros, scales = drawn(out, inputs, bits, symmetric, seed)
        group = torch.arange(inputs) // GROUP
        if shuffled:
            group = group[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
        stored = zeros if v2 else zeros - 1
        parts = {"qweight": words(codes, bits, 0), "qzeros": words(stored, bits, 1), "scales": scales}
        parts |= {"g_idx": group.to(torch.int32), "bias": torch.zeros(out, dtype=torch.float16)}
        return parts, ((codes - zeros[group]) * scales[group].float()).T

    return pack


def awq(out: int, inputs: int, seed: int) -> Packed:
    codes, zeros, scales = drawn(out, inputs, 4, False, seed)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {"qweight": words(codes, 4, 1, order), "qzeros": words(zeros, 4, 1, order), "scales": scales}
    return parts, ((codes - zeros.repeat_interleave(GROUP, 0)) * scales.float().repeat_interleave(GROUP, 0)).T


def pack_quantized(bits: int = 4, symmetric: bool = True) -> Callable[..., Packed]:
    def pack(out: int, inputs: int, seed: int) -> Packed:
        codes, zeros, scales = drawn(out, inputs, bits, symmetric, seed)
        scales = scales.to(torch.bfloat16)
        parts = {"weight_packed": words(codes.T, bits, 1), "weight_scale": scales.T.contiguous()}
        parts["weight_shape"] = torch.tensor([out, inputs])
        if not symmetric:
            parts["weight_zero_point"] = words(zeros.T, bits, 0)
        return parts, ((codes - zeros.repeat_interleave(GROUP, 0)) * scales.float().repeat_interleave(GROUP, 0)).T

    return pack


def int_quantized(out: int, inputs: int, seed: int) -> Packed:
    codes, _, _ = drawn(out, inputs, 8, True, seed)
    scale = torch.rand((out, 1), generator=torch.Generator().manual_seed(seed)).mul(1e-3).half().float() + 0
    weight = (codes.T - 128).to(torch.int8).contiguous()
    return {"weight": weight, "weight_scale": scale, "input_scale": torch.ones(1)}, weight.float() * scale


def fp8(scales: str) -> Callable[..., Packed]:
    def pack(out: int, inputs: int, seed: int) -> Packed:
        draw = torch.Generator().manual_seed(seed)
        weight = torch.randn((out, inputs), generator=draw).to(torch.float8_e4m3fn)
        if scales == "blocks":
            scale = torch.rand((-(-out // 16), -(-inputs // 16)), generator=draw) * 0.1 + 0.05
            spread = scale.repeat_interleave(16, 0)[:out].repeat_interleave(16, 1)[:, :inputs]
            return {"weight": weight, "weight_scale_inv": scale}, weight.float() * spread
        scale = torch.rand({"tensor": (), "rows": (out, 1)}[scales], generator=draw) * 0.1 + 0.05
        return {"weight": weight, "weight_scale": scale, "input_scale": torch.ones(())}, weight.float() * scale

    return pack


def compressed(format: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": GROUP}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


GPTQ = {"quant_method": "gptq", "group_size": GROUP, "checkpoint_format": "gptq"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
# How a layer is packed, quantization_config, what it becomes, how far numbers may be from the floats (relatively).
KINDS: dict[str, tuple[Callable[..., Packed], dict[str, Any], str, float]] = {
    "gptq": (gptq(), GPTQ | {"bits": 4, "sym": True}, "q4_0", 0),
    "gptq asymmetric": (gptq(symmetric=False), GPTQ | {"bits": 4, "sym": False}, "q5_0", 0),
    "gptq shuffled": (gptq(shuffled=True), GPTQ | {"bits": 4, "sym": True, "desc_act": True}, "f16", 2**-11),
    "gptq v2": (gptq(v2=True), GPTQ | {"bits": 4, "sym": True, "checkpoint_format": "gptq_v2"}, "q4_0", 0),
    "gptq 8 bit": (gptq(bits=8), GPTQ | {"bits": 8, "sym": True}, "q8_0", 0),
    "gptq 8 bit asymmetric": (gptq(bits=8, symmetric=False), GPTQ | {"bits": 8, "sym": False}, "f16", 2**-11),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}, "q5_0", 0),
    "w4a16": (pack_quantized(), compressed("pack-quantized"), "q4_0", 0),
    "w4a16 asymmetric": (pack_quantized(symmetric=False), compressed("pack-quantized"), "q5_0", 0),
    "w8a16": (pack_quantized(bits=8), compressed("pack-quantized"), "q8_0", 0),
    "w8a8": (int_quantized, compressed("int-quantized"), "q8_0", 0),
    "compressed fp8": (fp8("rows"), compressed("float-quantized"), "f16", 2**-11),
    "fp8 per tensor": (fp8("tensor"), FP8 | {"activation_scheme": "static"}, "f16", 2**-11),
    "fp8 per block": (fp8("blocks"), FP8 | {"weight_block_size": [16, 16]}, "f16", 2**-11),
}  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    make(folder, num_hidden_layers=1)
    return folder


def write(original: Path, folder: Path, pack: Callable[..., Packed], config: dict[str, Any]) -> tuple[Path, Path]:
    """A random Llama with packed layers, and the same with floats in their place."""
    packed, plain = folder / "packed", folder / "plain"
    shutil.copytree(original, plain)
    shutil.copytree(original, packed)
    floats = load_file(plain / "model.safetensors")
    codes = dict(floats)
    for seed, (name, weight) in enumerate(sorted(floats.items())):
        if name.endswith("_proj.weight"):
            del codes[name]
            parts, floats[name] = pack(*weight.shape, seed)
            codes |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
    save_file({name: tensor.contiguous() for name, tensor in floats.items()}, plain / "model.safetensors")
    save_file(codes, packed / "model.safetensors")
    settings = json.loads((packed / "config.json").read_text()) | {"quantization_config": config}
    (packed / "config.json").write_text(json.dumps(settings))
    return packed, plain


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_checkpoint_equals_its_floats(original: Path, tmp_path: Path, kind: str) -> None:
    pack, config, format, far = KINDS[kind]
    packed, plain = write(original, tmp_path, pack, config)
    ours, floats = open_checkpoint(packed).tensors, open_checkpoint(plain).tensors
    assert ours.keys() == floats.keys()
    for name, weight in ours.items():
        expected = floats[name].dequantise()
        assert weight.format == (format if name.endswith("_proj.weight") else "f32"), name
        np.testing.assert_allclose(weight.dequantise(), expected, rtol=far, atol=far * 1e-3, err_msg=name)

    ids = prompt(40)
    expected = Bench(load(plain, reference := ReferenceBackend()), reference).step({"a": ids})
    backend = ReferenceBackend()
    logits = Bench(load(packed, backend), backend).step({"a": ids})
    np.testing.assert_allclose(logits, expected, rtol=0, atol=5e-3 if far else 1e-4)
    if native.why_not() is None:
        kernels = NativeBackend(threads=1)
        try:
            logits = Bench(load(packed, kernels), kernels, block_size=32).step({"a": ids})
        finally:
            kernels.close()
        assert np.abs(logits - expected).mean() < 0.05 * np.abs(expected).mean()


def test_experts_in_mxfp4(original: Path, tmp_path: Path) -> None:
    """As gpt-oss stores them, against transformers' own conversion."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    draw = np.random.default_rng(0)
    blocks = torch.tensor(draw.integers(0, 256, (3, 8, 2, 16), dtype=np.uint8))
    scales = torch.tensor(draw.integers(115, 130, (3, 8, 2), dtype=np.uint8))
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    experts = {"mlp.experts.gate_up_proj_blocks": blocks, "mlp.experts.gate_up_proj_scales": scales}
    save_file(load_file(tmp_path / "model.safetensors") | experts, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    weight = open_checkpoint(tmp_path).tensors["mlp.experts.gate_up_proj"]
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)  # [experts, out, in]
    np.testing.assert_array_equal(weight.dequantise(), expected.numpy())


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes is not supported; take"),
    "an unknown method": ({"quant_method": "aqlm"}, "'aqlm' is not supported; accepted: gptq, awq, compressed-tensors"),
    "no method": ({"bits": 4}, "quant_method: is missing"),
    "3 bits": (GPTQ | {"bits": 3}, "bits: 3 is not supported; 4 and 8 are"),
    "marlin": (GPTQ | {"bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format: 'marlin' is not supported"),
    "awq gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version: 'gemv' of 4 bits is not supported"),
    "nvfp4": (compressed("nvfp4-pack-quantized"), "format: 'nvfp4-pack-quantized' is not supported; accepted: pack-"),
    "the wrong method": ({"quant_method": "awq"}, "qweight is of shape"),
    "symmetric that is not": (GPTQ | {"bits": 4, "sym": True}, "codes are not from -8 to 7, as the config says"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_not_supported_is_one_sentence(original: Path, tmp_path: Path, fault: str) -> None:
    config, sentence = FAULTS[fault]
    packed, _ = write(original, tmp_path, gptq(symmetric=False), config)
    with pytest.raises(ModelFileError) as error:
        load(packed, ReferenceBackend())
    assert sentence in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("part", ["qzeros", "scales", "g_idx"])
def test_tensors_of_a_layer_that_do_not_fit_are_named(original: Path, tmp_path: Path, part: str) -> None:
    packed, _ = write(original, tmp_path, gptq(), GPTQ | {"bits": 4, "sym": True})
    tensors = load_file(packed / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj.{part}"
    save_file(tensors | {name: tensors[name][:1].clone()}, packed / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"model\.layers\.0\.mlp\.up_proj: (its tensor|its codes)"):
        open_checkpoint(packed)
    del tensors[name]
    save_file(tensors, packed / "model.safetensors")
    if part != "g_idx":
        with pytest.raises(ModelFileError, match=rf"up_proj: its tensor {part} is missing"):
            open_checkpoint(packed)
