"""Checkpoints of the families with experts or latent attention as llama.cpp's converter writes them in GGUF."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

ARCHITECTURES = {
    "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "olmoe": "olmoe", "granitemoe": "granitemoe",
}  # fmt: skip


def mixture_to_gguf(folder: Path, path: Path, experts: str = "F32", kv_b: str = "") -> None:
    """Write a saved checkpoint as GGUF. experts: type of the routed experts' matrices; all else is F32. kv_b: type of
    the projections of latent attention, in one tensor as older files have them."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    _metadata(writer, config)
    if config["model_type"].startswith("deepseek"):
        _latent_metadata(writer, config, bool(kv_b))
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for name, tensor in _converted(load_file(folder / "model.safetensors"), config, bool(kv_b)):
        target = name if name.startswith("blk.") else names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        kind = experts if "_exps.weight" in target else kv_b if "attn_kv_b" in target else "F32"
        stored = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(target, gguf.quants.quantize(np.ascontiguousarray(tensor), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    latent = "kv_lora_rank" in config
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1 if latent else config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"] if latent else head)
    if not latent:
        writer.add_key_length(head)
        writer.add_value_length(head)
    writer.add_expert_count(
        next(config[n] for n in ("num_experts", "num_local_experts", "n_routed_experts") if n in config)
    )
    writer.add_expert_used_count(config["num_experts_per_tok"])
    if config["model_type"] not in ("mixtral", "olmoe", "granitemoe"):
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if config.get("sliding_window") and config["model_type"] == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "granitemoe":
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        if rope.get("mscale_all_dim"):
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
    writer.add_eos_token_id(2)


def _latent_metadata(writer: gguf.GGUFWriter, config: dict[str, Any], older: bool) -> None:
    third = config["model_type"] == "deepseek_v3"
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    head = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    if older:
        writer.add_key_length(head)
        writer.add_value_length(config["v_head_dim"])
    else:
        writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
        writer.add_value_length(config["kv_lora_rank"])
        writer.add_key_length_mla(head)
        writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(third and config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if third else gguf.ExpertGatingFuncType.SOFTMAX)
    if third or config["topk_method"] != "greedy":
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])


EXPERT = re.compile(r"model\.layers\.(\d+)\..*experts\.(\d+)\.(gate_proj|up_proj|down_proj|w[123])\.weight")
ROLES = {"w1": "gate", "w3": "up", "w2": "down", "gate_proj": "gate", "up_proj": "up", "down_proj": "down"}


def _converted(tensors: dict[str, np.ndarray], config: dict[str, Any], older: bool) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor): experts merged, gpt-oss' gates apart, keys' and values' projections of latent attention apart,
    rows of Mixtral's and Granite's queries and keys permuted."""
    merged: dict[str, dict[int, np.ndarray]] = {}
    for name, x in tensors.items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else ""
        if (found := EXPERT.fullmatch(name)) is not None:
            to = f"blk.{found[1]}.ffn_{ROLES[found[3]]}_exps.weight"
            merged.setdefault(to, {})[int(found[2])] = x
        elif name.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")):
            kind, x = ("weight", x.swapaxes(1, 2)) if x.ndim == 3 else ("bias", x)
            yield f"blk.{layer}.ffn_gate_exps.{kind}", x[:, 0::2]
            yield f"blk.{layer}.ffn_up_exps.{kind}", x[:, 1::2]
        elif name.endswith(("experts.down_proj", "experts.down_proj_bias")):
            kind, x = ("weight", x.swapaxes(1, 2)) if x.ndim == 3 else ("bias", x)
            yield f"blk.{layer}.ffn_down_exps.{kind}", x
        elif name.endswith("input_linear.weight"):
            for role, half in zip(("gate", "up"), np.split(x, 2, axis=1), strict=True):
                yield f"blk.{layer}.ffn_{role}_exps.weight", half
        elif name.endswith("output_linear.weight"):
            yield f"blk.{layer}.ffn_down_exps.weight", x
        elif name.endswith("kv_b_proj.weight") and not older:
            heads, plain = config["num_attention_heads"], config["qk_nope_head_dim"]
            keys, values = np.split(x.reshape(heads, -1, x.shape[-1]), [plain], axis=1)
            yield f"blk.{layer}.attn_k_b.weight", keys.swapaxes(1, 2)
            yield f"blk.{layer}.attn_v_b.weight", values
        elif name.endswith("e_score_correction_bias"):
            yield f"blk.{layer}.exp_probs_b.bias", x
        elif config["model_type"] in ("mixtral", "granitemoe") and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            half = x.shape[0] // heads // 2
            yield name, x.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(x.shape)
        elif name.endswith("shared_expert_gate.weight"):
            yield name, x[0]
        elif name.endswith("sinks"):
            yield f"blk.{layer}.attn_sinks.weight", x
        else:
            yield name, x
    for name, matrices in merged.items():
        yield name, np.stack([matrices[number] for number in range(len(matrices))])
