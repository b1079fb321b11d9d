"""GGUF files of the families with experts or latent attention give the logits of the checkpoints they were made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from headway.model.load import load
from headway.ops import native
from headway.ops.native.backend import NativeBackend
from headway.ops.reference import ReferenceBackend
from tests.model.checkpoints import logits, make, prompt
from tests.model.mixture_gguf import mixture_to_gguf
from tests.model.mixtures import MIXTURES, YARN
from tests.model.paging import Bench

PLAIN_YARN = {name: value for name, value in YARN.items() if "mscale" not in name}
SAME = YARN | {"mscale": 0.8}  # a GGUF has one figure for both
VARIANTS: dict[str, dict[str, Any]] = {
    "mixtral": MIXTURES["mixtral"] | {"sliding_window": None},
    "qwen2_moe": MIXTURES["qwen2_moe listed"] | {"mlp_only_layers": []},
    "qwen3_moe": MIXTURES["qwen3_moe"] | {"use_sliding_window": False},
    "gpt_oss": MIXTURES["gpt_oss"] | {"rope_parameters": PLAIN_YARN, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    "olmoe": MIXTURES["olmoe"] | {"norm_topk_prob": False},
    "granitemoe": MIXTURES["granitemoe"] | {"attention_bias": False},
    "deepseek_v2": MIXTURES["deepseek_v2"],
    "deepseek_v2 groups": MIXTURES["deepseek_v2 groups"] | {
        "rope_parameters": SAME, "attention_bias": False, "mlp_bias": False,
    },
    "deepseek_v3": MIXTURES["deepseek_v3"] | {"rope_parameters": SAME},
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_a_gguf_of_the_same_weights_gives_the_same_logits(tmp_path: Path, name: str) -> None:
    theirs = make(tmp_path, **VARIANTS[name])
    mixture_to_gguf(tmp_path, tmp_path / "m.gguf")
    ids, backend = prompt(150), ReferenceBackend(poison=True)
    model = load(tmp_path / "m.gguf", backend)
    np.testing.assert_allclose(Bench(model, backend).step({"a": ids}), logits(theirs, ids), rtol=0, atol=1e-4)
    buffers = sum(buffer.numel() for name, buffer in theirs.named_buffers() if "correction" in name)
    assert model.info.parameters == sum(p.numel() for p in theirs.parameters()) + buffers


@pytest.mark.parametrize(("kind", "atol"), [("F32", 1e-4), ("Q8_0", 5e-3)])
def test_older_files_with_both_projections_of_latent_attention_in_one(tmp_path: Path, kind: str, atol: float) -> None:
    theirs = make(tmp_path, **VARIANTS["deepseek_v2"] | {"kv_lora_rank": 32})
    mixture_to_gguf(tmp_path, tmp_path / "m.gguf", kv_b=kind)
    stored = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for role, parameter in theirs.named_parameters():
            if role.endswith("kv_b_proj.weight"):
                data = gguf.quants.quantize(parameter.numpy(), stored)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(data, stored)))
    ids, backend = prompt(40), ReferenceBackend()
    got = Bench(load(tmp_path / "m.gguf", backend), backend).step({"a": ids})
    np.testing.assert_allclose(got, logits(theirs, ids), rtol=0, atol=atol)


@pytest.mark.parametrize(("name", "kind"), [("gpt_oss", "MXFP4"), ("qwen3_moe", "Q8_0"), ("qwen3_moe", "Q4_0")])
def test_quantised_experts_give_the_logits_of_their_dequantised_selves(tmp_path: Path, name: str, kind: str) -> None:
    theirs = make(tmp_path, **VARIANTS[name] | ({} if name == "gpt_oss" else {"moe_intermediate_size": 64}))
    mixture_to_gguf(tmp_path, tmp_path / "m.gguf", kind)
    stored = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for role, parameter in theirs.named_parameters():
            if role.endswith(("experts.gate_up_proj", "experts.down_proj")):
                rows = parameter.transpose(1, 2) if name == "gpt_oss" else parameter
                data = gguf.quants.quantize(np.ascontiguousarray(rows.numpy()), stored)
                again = torch.from_numpy(gguf.quants.dequantize(data, stored))
                parameter.copy_(again.transpose(1, 2) if name == "gpt_oss" else again)
    ids, backend = prompt(40), ReferenceBackend()
    expected = logits(theirs, ids)
    np.testing.assert_allclose(
        Bench(load(tmp_path / "m.gguf", backend), backend).step({"a": ids}), expected, rtol=0, atol=1e-4
    )
    if native.available():
        quick = NativeBackend(threads=2)
        got = Bench(load(tmp_path / "m.gguf", quick), quick).step({"a": ids})
        assert np.abs(got - expected).mean() < 0.1
