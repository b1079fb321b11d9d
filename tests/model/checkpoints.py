"""Tiny random checkpoints of every family, made by transformers, and the logits it gives for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headway.shape.families import FAMILIES as SHAPES

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip

# What makes each checkpoint different from the small grouped-query Llama.
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "multi-head": {"num_key_value_heads": 4},
    "multi-query": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "wide heads": {"head_dim": 24},
    "biases": {"attention_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "qwen2 tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "qwen3 biases": {"model_type": "qwen3", "attention_bias": True, "head_dim": 24, "tie_word_embeddings": True},
}
# Families whose files or blocks are cut in other ways.
PHI3: dict[str, Any] = {"model_type": "phi3", "pad_token_id": 0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.5, 1.9, 2.5], "rope_theta": 500.0,
    "long_factor": [1.0, 2.0, 3.0, 4.5, 7.0, 9.0], "original_max_position_embeddings": 64,
}  # fmt: skip
VARIANTS |= {
    "phi3": PHI3,
    "phi3 longrope": PHI3 | {"rope_parameters": LONGROPE, "partial_rotary_factor": 0.75},
    "llama longrope": {"rope_parameters": LONGROPE | {"attention_factor": 1.4}, "head_dim": 12},
    "phi3 partial": PHI3 | {"partial_rotary_factor": 0.5, "head_dim": 24, "tie_word_embeddings": True},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 5, "pad_token_id": 0},
    "smollm3 listed": {
        "model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layers": [0, 1, 0], "head_dim": 24,
        "attention_bias": True, "tie_word_embeddings": True, "pad_token_id": 0,
    },
}  # fmt: skip
# Families with windows, multipliers and norms of their own; windows are shorter than the tests' prompts.
VARIANTS |= {
    "mlp biases": {"mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 24},
    "mistral window": {"model_type": "mistral", "sliding_window": 19},
    "qwen2 window": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1,
    },
    "qwen3 window": {
        "model_type": "qwen3", "use_sliding_window": True, "sliding_window": 7, "head_dim": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma2": {
        "model_type": "gemma2", "sliding_window": 21, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0, "head_dim": 24, "tie_word_embeddings": True,
    },
    "gemma2 uncapped": {
        "model_type": "gemma2", "sliding_window": 5, "head_dim": 16, "attention_bias": True,
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
    },
    "gemma3_text": {
        "model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": 17, "query_pre_attn_scalar": 30,
        "head_dim": 24, "tie_word_embeddings": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "gemma3_text capped": {
        "model_type": "gemma3_text", "sliding_window": 33, "head_dim": 16, "attention_bias": True,
        "final_logit_softcapping": 4.0, "sliding_window_pattern": 2,
    },
    "gemma": {"model_type": "gemma", "head_dim": 24, "tie_word_embeddings": True, "attention_bias": True},
    "ministral window": {
        "model_type": "ministral", "sliding_window": 11, "head_dim": 16,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "olmo3 window": {
        "model_type": "olmo3", "sliding_window": 9, "num_hidden_layers": 4, "attention_bias": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "exaone4": {"model_type": "exaone4", "sliding_window": 13, "num_hidden_layers": 5, "pad_token_id": 0},
    "exaone4 full": {
        "model_type": "exaone4", "sliding_window": None, "pad_token_id": 0, "layer_types": ["full_attention"] * 2,
    },
    "olmo2": {"model_type": "olmo2", "head_dim": 24},
    "olmo2 biases": {"model_type": "olmo2", "attention_bias": True, "tie_word_embeddings": True},
    "granite": {
        "model_type": "granite", "embedding_multiplier": 5.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2,
        "logits_scaling": 3.0, "rms_norm_eps": 1e-3,
    },
    "granite biases": {
        "model_type": "granite", "attention_bias": True, "mlp_bias": True, "head_dim": 24, "tie_word_embeddings": True,
        "attention_multiplier": 0.3, "residual_multiplier": 1.7,
    },
}  # fmt: skip
# What llama.cpp's files cannot say: windows of Mistral and Qwen, a scale of Gemma's scores but that of a head's width.
WINDOW_4 = {"sliding_window": 14, "layer_types": ["sliding_attention", "full_attention"]}
VARIANTS |= {
    "phi3 window": PHI3 | {"sliding_window": 23, "num_key_value_heads": 4},
    "smollm3 window": {
        "model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layer_interval": 2, "use_sliding_window": True,
        "sliding_window": 11, "mlp_bias": True, "pad_token_id": 0,
    },
    "starcoder2": {"model_type": "starcoder2", "norm_epsilon": 1e-3, "head_dim": 24},
    "starcoder2 window": {
        "model_type": "starcoder2", "use_bias": False, "sliding_window": 15, "hidden_act": "gelu",
        "tie_word_embeddings": True,
    },
    "gpt2": {"model_type": "gpt2", "n_inner": 80, "layer_norm_epsilon": 1e-3, "tie_word_embeddings": True},
    "gpt2 untied": {
        "model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False,
        "activation_function": "relu",
    },
    "gpt_neox": {"model_type": "gpt_neox", "layer_norm_eps": 1e-3},
    "gpt_neox in turn": {
        "model_type": "gpt_neox", "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new",
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    },
    "falcon": {"model_type": "falcon", "layer_norm_epsilon": 1e-3, "tie_word_embeddings": True},
    "falcon untied": {"model_type": "falcon", "multi_query": False, "bias": True, "ffn_hidden_size": 80},
    "falcon in turn": {"model_type": "falcon", "parallel_attn": False, "activation": "gelu_new"},
    "falcon 40b": {"model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon2": {
        "model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
        "bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "phi": {"model_type": "phi", "partial_rotary_factor": 0.4, "layer_norm_eps": 1e-3},
    "phi normed": {"model_type": "phi", "qk_layernorm": True, "hidden_act": "gelu"},
    "stablelm": {"model_type": "stablelm", "layer_norm_eps": 1e-3, "use_qkv_bias": True},
    "stablelm normed": {
        "model_type": "stablelm", "qk_layernorm": True, "partial_rotary_factor": 0.5, "tie_word_embeddings": True,
        "hidden_act": "gelu",
    },
    "stablelm parallel": {"model_type": "stablelm", "use_parallel_residual": True, "partial_rotary_factor": 1.0},
    "cohere": {"model_type": "cohere", "logit_scale": 0.3, "head_dim": 24, "layer_norm_eps": 1e-3},
    "cohere normed": {
        "model_type": "cohere", "use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": True,
    },
    "cohere2": {"model_type": "cohere2", "logit_scale": 2.0, "tie_word_embeddings": True} | WINDOW_4,
    "glm": {"model_type": "glm", "head_dim": 24, "pad_token_id": 0, "attention_bias": False},
    "glm4": {"model_type": "glm4", "head_dim": 16, "pad_token_id": 0, "partial_rotary_factor": 0.25},
    "nemotron": {"model_type": "nemotron", "head_dim": 24, "norm_eps": 1e-3, "mlp_bias": True},
    "nemotron biases": {
        "model_type": "nemotron", "attention_bias": True, "hidden_act": "relu", "partial_rotary_factor": 0.75,
    },
}  # fmt: skip
NOT_IN_GGUF = {
    "smollm3 listed", "smollm3 window", "starcoder2 window", "gpt2 untied", "gpt_neox in turn", "phi normed",
    "stablelm normed", "cohere2", "glm", "nemotron biases", "falcon in turn",
    "mistral window", "qwen2 window", "qwen3 window",
    "ministral window", "olmo3 window", "gemma2 uncapped", "gemma3_text capped",
}  # fmt: skip
IN_GGUF = {name: changes for name, changes in VARIANTS.items() if name not in NOT_IN_GGUF} | {
    "gemma2": VARIANTS["gemma2"] | {"query_pre_attn_scalar": 24},
    "gemma3_text": VARIANTS["gemma3_text"] | {"query_pre_attn_scalar": 24},
    "olmo3 window": VARIANTS["olmo3 window"] | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
        }
    },
    "cohere": VARIANTS["cohere"] | {"tie_word_embeddings": True},
}  # fmt: skip
# The plain variant of each family but Llama.
FAMILIES = ("qwen2", "qwen3", "mistral window", "gemma2", "gemma3_text", "olmo2", "granite")


def make(folder: Path, dtype: torch.dtype = torch.float32, shard: str = "1GB", **changes: Any) -> PreTrainedModel:
    """Write a random checkpoint -> the model as transformers reads it back, in float32."""
    torch.manual_seed(0)
    fields = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 160, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": False,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weight_of_norm = ("norm" in name or ".ln_" in name) and "bias" not in name
            if weight_of_norm or "bias" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + weight_of_norm)
        for name, buffer in model.named_buffers():
            if "correction" in name:
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """[tokens, vocab]."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def prompt(length: int, vocab: int = 160, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


# What the files people call Q4_K_M hold: more bits for values, and where rows do not fit Q4_K.
Q4_K_M = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "token_embd": "Q6_K", "output": "Q8_0", "attn_k": "Q5_0"}


def to_gguf(folder: Path, path: Path, kind: str = "F32", mixed: Mapping[str, str] | None = None) -> None:
    """Write a saved checkpoint as GGUF, the way llama.cpp's converter does: query and key rows of a Llama permuted
    per head, llama3 scaling as one factor per pair. kind: type of the matrices; `mixed` names others by the tensor's
    short name. Types that the gguf package does not quantise to get random weights of N(0, 0.1) or so."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    model_type = config["model_type"]
    config = SHAPES[model_type].complete(config)  # under Llama's names
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    family = ARCHITECTURES.get(model_type, model_type)
    rope = config.get("rope_parameters") or {"rope_type": "none"}
    rope = rope.get("full_attention", rope)
    writer = gguf.GGUFWriter(path, family)
    _add_scales(writer, config)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if family in LAYER_NORMED:
        writer.add_layer_norm_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if rope["rope_type"] != "none":
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    writer.add_eos_token_id(2)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        spread = config["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(
            rope.get("attention_factor") or (1 + np.log(spread) / np.log(original)) ** 0.5
        )
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _factors(rope, head_dim))
    architecture = gguf.MODEL_ARCH[family.upper().replace("-", "_")]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for name, tensor in tensors.items():
        if family.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if family == "nemotron" and name.endswith("norm.weight"):
            tensor = tensor + 1
        if family == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            tensor = tensor.T
        if "query_key_value" in name:
            each = heads // kv_heads  # queries, key and value of every key/value head
            parts = np.split(tensor.reshape(kv_heads, each + 2, head_dim, -1), [each, each + 1], axis=1)
            tensor = np.concatenate([part.reshape(-1, *tensor.shape[1:]) for part in parts])
        if family in ("llama", "smollm3", "granite") and ("q_proj" in name or "k_proj" in name):
            n = heads if "q_proj" in name else kv_heads
            tensor = tensor.reshape(n, 2, head_dim // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        short = target.removesuffix(".weight").rpartition(".")[2]
        stored = gguf.GGMLQuantizationType[(mixed or {}).get(short, kind) if tensor.ndim == 2 else "F32"]
        if stored.name.lower() in FACTORS:
            data = random_blocks(tensor.shape, stored, len(target))
        else:
            data = gguf.quants.quantize(np.ascontiguousarray(tensor), stored)
        writer.add_tensor(target, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# What llama.cpp calls a family, where that is not transformers' name; and which of its families have layer norms.
ARCHITECTURES = {
    "mistral": "llama", "gemma3_text": "gemma3", "olmo3": "olmo2",
    "phi": "phi2", "gpt_neox": "gptneox", "cohere": "command-r",
}  # fmt: skip
LAYER_NORMED = {"falcon", "gpt2", "gptneox", "phi2", "stablelm", "starcoder2", "command-r", "nemotron"}


def _add_scales(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Windows, caps and multipliers, as far as llama.cpp's converter writes them for these families."""
    adders: dict[str, Callable[[Any], None]] = {
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "attention_multiplier": writer.add_attention_scale,
        "logits_scaling": writer.add_logit_scale,
        "sliding_window": writer.add_sliding_window,
        "logit_scale": writer.add_logit_scale,
        "use_parallel_residual": writer.add_parallel_residual,
    }
    for field, add in adders.items():
        if config.get(field) is not None and not config["model_type"].startswith(("qwen", "falcon")):
            add(config[field])
    ropes = config.get("rope_parameters", {})
    if "sliding_attention" in ropes:
        if config["model_type"] == "gemma3_text":
            writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


# Where the K formats' float16 factors lie in a block, and about what they must be for weights of N(0, 0.1).
FACTORS = {
    "q2_k": {80: 0.007, 82: 0.011}, "q3_k": {108: 0.0025}, "q4_k": {0: 0.0004, 2: 0.003},
    "q5_k": {0: 0.0002, 2: 0.003}, "q6_k": {208: 0.00008},
}  # fmt: skip


def random_blocks(shape: tuple[int, ...], stored: gguf.GGMLQuantizationType, seed: int) -> np.ndarray:
    """Rows of valid blocks with random codes, uint8 [rows, bytes]."""
    rng = np.random.default_rng(seed)
    numbers, size = gguf.GGML_QUANT_SIZES[stored]
    data = rng.integers(0, 256, (shape[0], shape[1] // numbers, size), dtype=np.uint8)
    for byte, factor in FACTORS[stored.name.lower()].items():
        values = (factor * rng.uniform(0.7, 1.3, data.shape[:2])).astype(np.float16)
        data[..., byte : byte + 2] = values[..., None].view(np.uint8)
    return data.reshape(shape[0], -1)


def _factors(rope: dict[str, float], head_dim: int) -> np.ndarray:
    """What llama3 scaling divides each pair's frequency by, float32 [head_dim / 2]."""
    factors = []
    for pair in range(head_dim // 2):
        wave = 2 * np.pi * rope["rope_theta"] ** (2 * pair / head_dim)
        low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
        high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
        smooth = (low / wave - 1) / (low / high - 1) if high <= wave <= low else float(wave < high)
        factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
