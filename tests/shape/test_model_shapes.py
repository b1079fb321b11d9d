"""A model's shape from its config.json alone: exact to the tensor against checkpoints written by `transformers`."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import BadInput
from headway.shape.catalogue import find_model, model_config, model_names
from headway.shape.config import shape_from_config, tensors_of
from headway.shape.model import KVGroup, kv_bytes, kv_bytes_per_token, store_as, weight_bytes

BASE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0,
}  # fmt: skip
WIDE = BASE | {"hidden_size": 64}  # as wide as its heads together
ROUTED = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 14,
    "num_key_value_heads": 4,
}
DEEPSEEK = BASE | ROUTED | LATENT | {
    "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1
}  # fmt: skip
INDEXED = DEEPSEEK | {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
GATED_DELTA = BASE | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
QWEN_MOE = {"num_experts": 6, "shared_expert_intermediate_size": 40} | ROUTED
GLM_MOE = BASE | ROUTED | {"n_routed_experts": 6, "n_shared_experts": 1, "first_k_dense_replace": 1}
GEMMA4 = BASE | {"num_hidden_layers": 12, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 0}
HEADS = {key: value for key, value in BASE.items() if key != "intermediate_size"}
KDA = BASE | ROUTED | LATENT | {
    "q_lora_rank": None, "num_experts": 6, "num_experts_per_token": 2, "linear_head_dim": 8, "linear_num_heads": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
GEMMA3N = BASE | {
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "num_kv_shared_layers": 1, "laurel_rank": 5,
    "altup_num_inputs": 3, "intermediate_size": [48, 40, 48, 56],
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
MAMBA = BASE | ROUTED | {
    "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "n_routed_experts": 6,
    "moe_shared_expert_intermediate_size": 20, "hybrid_override_pattern": "M*-E",
}  # fmt: skip
COMPRESSED = HEADS | ROUTED | {
    "q_lora_rank": 12, "o_groups": 2, "o_lora_rank": 6, "index_n_heads": 3, "index_head_dim": 8, "index_topk": 4,
    "n_routed_experts": 6, "num_hidden_layers": 5,
    "layer_types": ["heavily_compressed_attention"] * 3 + ["compressed_sparse_attention", "sliding_attention"],
}  # fmt: skip
LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", BASE), ("llama", BASE | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("mistral", BASE), ("mixtral", BASE | LOCAL), ("granite", BASE), ("smollm3", BASE), ("olmo2", BASE),
    ("qwen2", BASE), ("qwen2_moe", BASE | QWEN_MOE), ("qwen2_moe", BASE | QWEN_MOE | {"decoder_sparse_step": 2}),
    ("qwen3", BASE), ("qwen3_moe", BASE | ROUTED | {"num_experts": 6, "mlp_only_layers": [0]}),
    ("qwen3_next", GATED_DELTA | QWEN_MOE), ("qwen3_5_text", GATED_DELTA), ("qwen3_5_moe_text", GATED_DELTA | QWEN_MOE),
    ("gemma", BASE), ("gemma2", BASE), ("gemma3_text", BASE | {"num_hidden_layers": 7}), ("phi3", BASE),
    ("glm", BASE), ("glm4", BASE), ("glm4_moe", GLM_MOE), ("glm4_moe", GLM_MOE | {"use_qk_norm": True}),
    ("deepseek_v2", DEEPSEEK | {"topk_method": "greedy"}), ("deepseek_v2", DEEPSEEK | {"q_lora_rank": None}),
    ("deepseek_v3", DEEPSEEK), ("deepseek_v32", INDEXED),
    ("glm_moe_dsa", INDEXED | {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}),
    ("gemma4_text", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 24}),
    ("gemma4_text", GEMMA4 | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 5,
                               "use_double_wide_mlp": True}),
    ("gemma4_text", GEMMA4 | {
        "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24,
    }),
    ("llama4_text", BASE | LOCAL | {"intermediate_size_mlp": 64, "interleave_moe_layer_step": 2}),
    ("gemma3n_text", GEMMA3N), ("nemotron_h", MAMBA), ("nemotron_h", MAMBA | {"moe_latent_size": 16}),
    ("kimi_linear", KDA), ("minimax", BASE | LOCAL), ("deepseek_v4", COMPRESSED),
    ("gpt_oss", BASE | LOCAL), ("granitemoe", BASE | LOCAL), ("minimax_m2", BASE | LOCAL),
    ("olmoe", WIDE | {"num_experts": 6, "num_experts_per_tok": 2}),
    ("starcoder2", BASE), ("starcoder2", BASE | {"use_bias": False}), ("cohere", BASE | {"use_qk_norm": True}),
    ("cohere", BASE | {"attention_bias": True, "tie_word_embeddings": False}), ("cohere2", WIDE), ("nemotron", BASE),
    ("nemotron", BASE | {"mlp_bias": True, "attention_bias": True}), ("phi", BASE), ("gpt_neox", WIDE),
    ("phi", WIDE | {"qk_layernorm": True, "tie_word_embeddings": True}), ("gpt2", WIDE | {"n_inner": 40}),
    ("gpt2", {key: value for key, value in WIDE.items() if key != "intermediate_size"}),
    ("stablelm", WIDE | {"use_qkv_bias": True}),
    ("stablelm", WIDE | {"qk_layernorm": True, "use_parallel_residual": True}),
]  # fmt: skip


TABLES = re.compile("__metadata__|_decay$|slope_rate$|tid2eid$")  # of numbers that are no parameters


def saved(model_type: str, config: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """(config.json, tensor name -> shape) of a random checkpoint, read from the safetensors header."""
    transformers = pytest.importorskip("transformers")
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **config))
    model.save_pretrained(folder)
    tensors: dict[str, list[int]] = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        tensors |= {name: entry["shape"] for name, entry in header.items() if not TABLES.search(name)}
    return json.loads((folder / "config.json").read_text()), tensors


@pytest.mark.parametrize(("model_type", "config"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_parameters_are_exact_to_the_tensor(model_type: str, config: dict[str, Any], tmp_path: Path) -> None:
    written, tensors = saved(model_type, config, tmp_path)
    expected = {
        tensor.name.format(copy) if tensor.copies > 1 else tensor.name: list(tensor.shape)
        for tensor in tensors_of(written)
        for copy in range(tensor.copies)
    }
    assert expected == tensors
    shape = shape_from_config(written)
    assert not shape.unread
    numel = dict.fromkeys(tensors, 1)
    for name, sizes in tensors.items():
        for size in sizes:
            numel[name] *= size
    assert shape.n_params == sum(numel.values())


# name -> (billions of parameters, billions active) as the makers state them; the sum over tensors must agree
PUBLISHED = {
    "llama-3.1-8b": (8.03, 8.03), "llama-3.1-70b": (70.55, 70.55), "llama-3.1-405b": (405.85, 405.85),
    "llama-3.2-1b": (1.24, 1.24), "qwen2.5-7b": (7.62, 7.62), "qwen3-32b": (32.8, 32.8), "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22), "mistral-7b": (7.25, 7.25), "mixtral-8x7b": (46.7, 12.9), "gemma-2-9b": (9.24, 9.24),
    "gemma-3-270m": (0.268, 0.268), "gemma-3-27b": (27.0, 27.0), "deepseek-v2": (236, 21), "deepseek-v3": (671, 37),
    "gpt-oss-20b": (20.9, 3.6), "gpt-oss-120b": (116.8, 5.1), "glm-4.5-air": (106.9, 12.8), "kimi-k2": (1026, 32),
    "minimax-m2": (229, 10.4), "qwen3.5-397b-a17b": (397, 17), "glm-5": (744, 40), "smollm2-135m": (0.1345, 0.1345),
    "phi-4": (14.66, 14.66), "llama-4-scout": (107.8, 17), "llama-4-maverick": (400.7, 17),
    "kimi-linear-48b": (49.1, 3.4), "minimax-text-01": (456, 45.9 + 1.2),  # whose makers count no head
    "nemotron-3-nano-30b-a3b": (31.6, 3.3), "deepseek-v4-flash": (284, 13.3),
    "gemma-3n-e4b": (6.87, 6.87), "starcoder2-15b": (15.96, 15.96), "qwen3-vl-235b-a22b": (235, 22),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_catalogue_agrees_with_published_sizes(name: str) -> None:
    total, active = PUBLISHED[name]
    shape = find_model(name)
    assert shape.n_params / 1e9 == pytest.approx(total, rel=0.006)
    # makers count the embedding among active parameters or not; ours leaves it out for mixtures
    embed = shape.params.embed if shape.is_moe else 0
    assert shape.n_active / 1e9 <= active * 1.025 and (shape.n_active + embed) / 1e9 >= active * 0.975


def test_every_catalogued_model_is_found_by_every_spelling() -> None:
    for name in set(model_names().values()):
        assert not find_model(name).unread
        assert find_model(name.upper()).name == name
        assert model_config(name) is not None
    assert find_model("meta-llama/Llama-3.1-8B-Instruct").name == "llama-3.1-8b"


# numbers cached per token and layer (B1): GQA 2*n_kv*d_k, MLA d_c + d_r; bytes at 16 bits over all layers
KV_PER_TOKEN = {
    "llama-3.1-8b": 2 * 8 * 128 * 32 * 2, "llama-3.1-70b": 2 * 8 * 128 * 80 * 2, "deepseek-v3": (512 + 64) * 61 * 2,
    "qwen3-235b-a22b": 2 * 4 * 128 * 94 * 2, "qwen3.5-397b-a17b": 2 * 2 * 256 * 15 * 2,
    "llama-2-7b": 2 * 32 * 128 * 32 * 2,
}  # fmt: skip


@pytest.mark.parametrize("name", KV_PER_TOKEN)
def test_cache_bytes_per_token(name: str) -> None:
    assert kv_bytes_per_token(find_model(name)) == KV_PER_TOKEN[name]


def test_tensor_parallel_splits_heads_up_to_their_number_and_never_a_latent_vector() -> None:
    llama, deepseek = find_model("llama-3.1-70b"), find_model("deepseek-v3")
    assert kv_bytes(llama, 100, 4) == kv_bytes(llama, 100) / 4
    assert kv_bytes(llama, 100, 16) == kv_bytes(llama, 100, 8) == kv_bytes(llama, 100) / 8
    assert kv_bytes(deepseek, 100, 8) == kv_bytes(deepseek, 100)


def test_windows_stop_growing_and_states_never_do() -> None:
    gemma = find_model("gemma-3-27b")  # 1024 positions in 5 of 6 layers
    window, full = gemma.groups
    assert (len(window.layers), len(full.layers), window.window) == (52, 10, 1024)
    grown = kv_bytes(gemma, 9000) - kv_bytes(gemma, 8000)
    assert grown == pytest.approx(1000 * len(full.layers) * full.layer_row_bytes())
    qwen = find_model("qwen3-next-80b-a3b")
    state = qwen.groups[0]
    assert state.kind == "state" and state.kept(1) == state.kept(100_000) == 1


def test_compressed_attention_keeps_a_row_for_many_tokens() -> None:
    flash = find_model("deepseek-v4-flash")
    window, sparse, index, heavy = flash.groups
    assert window.window == 128 and (sparse.stride, heavy.stride) == (4, 128)
    assert heavy.layer_row_bytes() == 512 * 2 / 128 and sparse.read(100_000) == 512 * 4 and index.read(9) == 9
    assert kv_bytes(flash, 100_000) < kv_bytes(find_model("deepseek-v3"), 100_000) / 10


def test_fields_that_could_change_a_shape_and_are_not_known_are_named() -> None:
    config = BASE | {"model_type": "llama", "num_memory_layers": 3}
    assert shape_from_config(config).unread == ("num_memory_layers",)


def test_sparse_attention_keeps_all_and_reads_some() -> None:
    glm = find_model("glm-5")  # the indexer still reads its own key of every token
    latent, index = glm.groups
    read = sum(group.reading_layers * group.layer_row_bytes() * group.read(100_000) for group in glm.groups)
    assert kv_bytes(glm, 100_000) > read
    assert latent.read(100_000) == 2048 and index.read(100_000) == 100_000


def test_layers_that_share_a_cache_store_none(tmp_path: Path) -> None:
    config = GEMMA4 | {"model_type": "gemma4_text", "num_kv_shared_layers": 5, "sliding_window": 64}
    window, full = shape_from_config(config).groups
    assert (window.layers, window.readers, window.key_width) == ((0, 1, 2, 3, 4, 6), 4, 16)
    assert (full.layers, full.readers, full.key_width) == ((5,), 1, 512)


def test_shared_caches_are_stored_once_and_read_by_all() -> None:
    group = KVGroup("full", (0, 1), 4, 8, 8, readers=3)
    assert kv_bytes((group,), 10) == 2 * 10 * 4 * 16 * 2
    assert group.reading_layers == 5


QUANTISED = {
    "fp8": ({"quant_method": "fp8"}, "fp8", 1.0),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4", 0.5 + 2.5 / 128),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64}, "int4", 0.5 + 2.5 / 64),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}}}},
        "int8", 1.0,
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", 0.5625),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_layers_are_read_from_the_checkpoints_own_config(name: str) -> None:
    quantisation, number_format, size = QUANTISED[name]
    config = dict(model_type="llama", **{k: v for k, v in BASE.items() if k != "pad_token_id"})
    plain = shape_from_config(config)
    shape = shape_from_config(config | {"quantization_config": quantisation})
    assert shape.weight_format == number_format
    assert shape.stored.mlp == pytest.approx(plain.params.mlp * size)
    assert (shape.stored.embed, shape.stored.head, shape.stored.norm) == (
        plain.stored.embed, plain.stored.head, plain.stored.norm,
    )  # fmt: skip
    spared = shape_from_config(
        config | {"quantization_config": quantisation | {"ignore": ["re:.*self_attn.*", "model.layers.0.mlp.up_proj"]}}
    )
    assert spared.stored.attention == plain.stored.attention
    assert plain.stored.mlp > spared.stored.mlp > shape.stored.mlp


def test_mixed_checkpoints_have_their_published_file_sizes() -> None:
    assert find_model("gpt-oss-120b").stored.total == pytest.approx(65.2e9, rel=0.01)  # experts in MXFP4 only
    assert find_model("deepseek-v3").stored.total == pytest.approx(673e9, rel=0.01)  # fp8, 16-bit embeddings


def test_precision_by_name() -> None:
    shape = find_model("llama-3.1-8b")
    assert weight_bytes(shape, "fp8") == shape.n_params
    assert store_as(shape, "int4").stored.total < weight_bytes(shape, "fp8")
    with pytest.raises(BadInput, match="--precision: 'int3'"):
        weight_bytes(shape, "int3")


BAD = {
    "not a language model": ({"model_type": "vit"}, "model_type.*'vit' is not a language model"),
    "no model_type": ({"hidden_size": 3}, "model_type: missing"),
    "no layers": ({"model_type": "llama", "hidden_size": 8}, "num_hidden_layers: is missing"),
    "negative": ({"model_type": "llama", "num_hidden_layers": -2}, "num_hidden_layers: -2"),
    "a word": ({"model_type": "llama", "num_hidden_layers": "many"}, "num_hidden_layers: 'many'"),
    "billions": (dict(BASE, model_type="llama", num_hidden_layers=2**31), "num_hidden_layers: 2147483648 .* 1 to 4096"),
    "a list": ([1, 2], "not a JSON object"),
    "layer types": (dict(BASE, model_type="llama", layer_types=["full_attention"]), "layer_types.*list of 4"),
    "too many active": (
        dict(BASE, model_type="mixtral", num_local_experts=2, num_experts_per_tok=3), "3 of 2 experts",
    ),
    "quantisation": (dict(BASE, model_type="llama", quantization_config={"quant_method": "x"}), "'x' is not known"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_configs_are_refused_in_one_sentence_that_names_the_field(name: str) -> None:
    config, sentence = BAD[name]
    with pytest.raises(BadInput, match=sentence) as caught:
        shape_from_config(config)
    assert "\n" not in str(caught.value)


def test_unknown_models_are_refused_with_near_names() -> None:
    with pytest.raises(BadInput, match=r"llama-3\.1-8b"):
        find_model("lama-3.1-8b")


@pytest.mark.parametrize(
    ("name", "model", "format"),
    [
        ("nvidia/Llama-3.1-8B-Instruct-FP8", "llama-3.1-8b", "fp8"),
        ("RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w4a16", "llama-3.1-70b", "int4"),
        ("hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4", "llama-3.1-8b", "int4"),
        ("RedHatAI/Qwen3-32B-FP8-dynamic", "qwen3-32b", "fp8"),
        ("someone/DeepSeek-R1-0528-AWQ", "deepseek-r1", "int4"),
        ("nvidia/Llama-3.3-70B-Instruct-FP4", "llama-3.3-70b", "nvfp4"),
        ("someone/Qwen2.5-7B-Instruct-4bit", "qwen2.5-7b", "int4"),
        ("unsloth/Llama-3.2-1B-Instruct", "llama-3.2-1b", "bf16"),
    ],
)
def test_quantised_and_tuned_re_uploads_are_the_catalogued_model(name, model, format):
    shape = find_model(name)
    assert (shape.name, shape.weight_format) == (model, format)
    assert shape.n_params == find_model(model).n_params


@pytest.mark.parametrize("name", ["acme/unheard-of-9b-instruct", "someone/Qwen9-7B-FP8", "fp8", "-instruct"])
def test_a_name_that_begins_like_no_model_stays_unknown(name):
    with pytest.raises(BadInput, match="is not in the catalogue"):
        find_model(name)
