"""Gemma 3 as its files come: wrapped with an encoder or alone, with ropes as transformers 4 and 5 spell them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, Gemma3ForConditionalGeneration

from headway.core.errors import ModelFileError
from headway.model.load import describe, load
from headway.ops.reference import ReferenceBackend
from headway.shape.config import shape_from_config
from tests.model.checkpoints import VARIANTS, logits, make, prompt
from tests.model.paging import Bench

VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
IDS = prompt(60)


def change(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


def ours(folder: Path) -> np.ndarray:
    backend = ReferenceBackend(poison=True)
    return Bench(load(folder, backend), backend).step({"a": IDS})


def spelled_by_4(config: dict[str, Any]) -> None:
    """As transformers 4 wrote it, and most files of the hub are."""
    full, local = (config["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    del config["rope_parameters"], config["layer_types"]
    config["rope_theta"], config["rope_local_base_freq"] = full["rope_theta"], local["rope_theta"]
    config["rope_scaling"] = {"rope_type": "linear", "factor": full["factor"]}
    config["sliding_window_pattern"] = 2


def test_ropes_as_transformers_4_spells_them(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    theirs = make(tmp_path, **VARIANTS["gemma3_text"] | {"layer_types": kinds})
    change(tmp_path, spelled_by_4)
    np.testing.assert_allclose(ours(tmp_path), logits(theirs, IDS), rtol=0, atol=1e-4)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("tied", [True, False])
def test_the_text_model_inside_a_wrapper(tmp_path: Path, prefix: str, tied: bool) -> None:
    torch.manual_seed(0)
    make(tmp_path / "text", **VARIANTS["gemma3_text"])
    text = json.loads((tmp_path / "text" / "config.json").read_text()) | {"tie_word_embeddings": tied}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=VISION, tie_word_embeddings=tied)
    theirs = Gemma3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path)
    if prefix.startswith("model."):
        rename(tmp_path / "model.safetensors", prefix)
    np.testing.assert_allclose(ours(tmp_path), logits(theirs, IDS), rtol=0, atol=1e-4)
    planned = shape_from_config(json.loads((tmp_path / "config.json").read_text()))
    info = describe(tmp_path)
    assert info.architecture == "gemma3_text"
    assert (
        info.parameters
        == planned.n_params
        == sum(
            weight.numel()
            for name, weight in theirs.named_parameters()
            if "vision" not in name and "multi_modal" not in name
        )
    )


def rename(path: Path, prefix: str) -> None:
    """The names that other releases of transformers give to the tensors."""
    from safetensors.torch import load_file, save_file

    def other(name: str) -> str:
        if name.startswith("language_model.lm_head."):
            return name.removeprefix("language_model.")
        inside = name.removeprefix("language_model.model.")
        return prefix + inside if inside != name else f"model.{name}"

    save_file({other(name): tensor for name, tensor in load_file(path).items()}, path)


def test_a_rope_that_transformers_would_not_look_at_is_refused(tmp_path: Path) -> None:
    make(tmp_path, **VARIANTS["gemma3_text"])
    change(tmp_path, lambda config: config.update(rope_parameters={"rope_type": "default", "rope_theta": 10.0}))
    with pytest.raises(ModelFileError, match=r"rope_parameters: rope_type: is not a kind of layer"):
        describe(tmp_path)
