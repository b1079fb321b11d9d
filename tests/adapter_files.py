"""LoRA adapters as PEFT saves them, written by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

PREFIX = "base_model.model."


def write_config(folder: Path, modules: Iterable[str], **settings: Any) -> None:
    """adapter_config.json for rank 4 and a factor of 2; a setting of ... is left out."""
    folder.mkdir(exist_ok=True)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "lora_dropout": 0.05, "bias": "none",
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}), "rank_pattern": {},
        "alpha_pattern": {}, "use_rslora": False, "use_dora": False, "fan_in_fan_out": False, "modules_to_save": None,
        "init_lora_weights": True, "base_model_name_or_path": "tiny", "inference_mode": True, "loftq_config": {},
        "qalora_group_size": 16,
    } | settings  # fmt: skip
    given = {name: value for name, value in config.items() if value is not ...}
    (folder / "adapter_config.json").write_text(json.dumps(given))


def write_random(
    folder: Path,
    shapes: Mapping[str, tuple[int, int]],
    seed: int = 0,
    size: float = 0.1,
    rank: int = 4,
    **settings: Any,
) -> Path:
    """A random adapter over the modules of these shapes (out, in)."""
    rng = np.random.default_rng(seed)
    write_config(folder, shapes, r=rank, **settings)
    tensors = {}
    for module, (out, inputs) in shapes.items():
        for side, shape in (("A", (rank, inputs)), ("B", (out, rank))):
            tensors[f"{PREFIX}{module}.lora_{side}.weight"] = (rng.standard_normal(shape) * size).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
