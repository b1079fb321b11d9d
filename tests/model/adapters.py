"""Random LoRA adapters for the tiny checkpoints, as PEFT and llama.cpp write them, and models with them merged."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tests.adapter_files import PREFIX, write_config

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]  # module -> A [rank, in], B [out, rank]


def random_pairs(
    model: PreTrainedModel, targets: Sequence[str] = ALL, rank: int = 4, seed: int = 0, size: float = 0.1
) -> Pairs:
    """For every linear module of these names, or whose names end so."""
    draw = torch.Generator().manual_seed(seed)
    pairs = {}
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and {module, module.rpartition(".")[2]} & {*targets}:
            out, inputs = reversed(parameter.shape) if kept_transposed(model, module) else parameter.shape
            pairs[module] = tuple(torch.randn(s, generator=draw) * size for s in ((rank, inputs), (out, rank)))
    return pairs


def kept_transposed(model: PreTrainedModel, module: str) -> bool:
    """GPT-2's matrices are [in, out]."""
    return type(model.get_submodule(module)).__name__ == "Conv1D"


def merged(model: PreTrainedModel, pairs: Pairs, scale: float | Mapping[str, float]) -> PreTrainedModel:
    """A copy of the model with the adapter in its weights. scale: of all modules, or of each."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for module, (down, up) in pairs.items():
            factor = scale[module] if isinstance(scale, Mapping) else scale
            delta = factor * (up.float() @ down.float())
            copied.get_submodule(module).weight += delta.T if kept_transposed(model, module) else delta
    return copied


def write_peft(folder: Path, pairs: Pairs, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """As `PeftModel.save_pretrained` does; a setting of ... is left out."""
    write_config(folder, pairs, **settings)
    tensors = {}
    for module, halves in pairs.items():
        for side, half in zip("AB", halves, strict=True):
            tensors[f"{PREFIX}{module}.lora_{side}.weight"] = half.to(dtype).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(path: Path, pairs: Pairs, config: Any, alpha: float = 8.0) -> Path:
    """As llama.cpp's convert_lora_to_gguf does for a Llama: rows of queries and keys permuted per head."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for module, (down, up) in pairs.items():
        layer, rest = module.removeprefix("model.layers.").split(".", 1)
        rows = up.numpy()
        count = heads.get(rest.rpartition(".")[2])
        if count:
            rows = rows.reshape(count, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)
        for side, half in (("a", down.numpy()), ("b", np.ascontiguousarray(rows))):
            writer.add_tensor(f"blk.{layer}.{_GGUF_NAMES[rest]}.weight.lora_{side}", half)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
