"""Model families as `config.json` names them: what each one adds to the common decoder, and how its layers alternate.

One row per `model_type`. The tensor inventory (`tensors.py`) and the KV groups (`config.py`) read nothing else, so a
new family of the common kind is a new row. Checked tensor by tensor against checkpoints written by `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headway.core.errors import BadInput
from headway.core.fields import Fields
from headway.shape import implied
from headway.shape.family import NORMS_2, NORMS_4, NORMS_BEHIND, Family

FALCON_NORMS = "num_ln_in_parallel_attn"
NO_BIAS: Mapping[str, Any] = {"qkv_bias": False, "o_bias": False}
TIED = {"tie_word_embeddings": True}
CONTEXT_2K = {"max_position_embeddings": 2048}
CONTEXT_128K = {"max_position_embeddings": 131072}
NO_QK_NORM = {"use_qk_norm": False}
EPS_5 = {"rms_norm_eps": 1e-5}
MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
QWEN_WINDOW = {
    "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
}  # fmt: skip
QWEN = QWEN_WINDOW | {"num_key_value_heads": 32}
GEMMA = TIED | {"head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 8192}
GEMMA_2 = GEMMA | {
    "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 26, "sliding_window": 4096, "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
GEMMA_3 = GEMMA_2 | {
    "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "attn_logit_softcapping": None, "final_logit_softcapping": None,
}  # fmt: skip
GEMMA_ACT = (("hidden_act", "hidden_activation"),)
WHOLE_HEADS = ("head_dim", "num_key_value_heads")
BIASED = {"attention_bias": True, "mlp_bias": True} | EPS_5
EPS = ("rms_norm_eps", "layer_norm_eps")
COHERE = TIED | NO_QK_NORM | EPS_5 | {"logit_scale": 0.0625, "max_position_embeddings": 8192}
GLM = {
    "attention_bias": True, "head_dim": 128, "num_key_value_heads": 2, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07, "max_position_embeddings": 131072,
}  # fmt: skip
LAYERNORMS = (("self_attn.q_norm", "self_attn.q_layernorm"), ("self_attn.k_norm", "self_attn.k_layernorm"))
LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
# What the heirs of DeepSeek V3 take for fields that they leave out is not what it does itself.
DEEPSEEK_V3 = Family(experts="mlp", shared="sum", correction=True, fields=(("head_dim", "qk_rope_head_dim"),))
FALCON = Family(
    norm_bias=True, plain_mlp=True, fused_qkv=True, shared_norm=True, inner=4, unread=WHOLE_HEADS[:1],
    implied=implied.falcon,
    defaults=TIED | CONTEXT_2K | EPS_5 | {
        "hidden_act": "gelu", "multi_query": True, "parallel_attn": True, "bias": False,
    },
    fields=(
        ("rms_norm_eps", "layer_norm_epsilon"), ("attention_bias", "bias"), ("mlp_bias", "bias"),
        ("intermediate_size", "ffn_hidden_size"), ("hidden_act", "activation"), ("num_key_value_heads", "num_kv_heads"),
    ),
    names=(
        ("model.layers.", "transformer.h."), ("model.embed_tokens", "transformer.word_embeddings"),
        ("model.norm", "transformer.ln_f"), ("self_attn.qkv_proj", "self_attention.query_key_value"),
        ("self_attn.o_proj", "self_attention.dense"), ("mlp.up_proj", "mlp.dense_h_to_4h"),
        ("mlp.down_proj", "mlp.dense_4h_to_h"),
    ),
)  # fmt: skip
YARN_OF_GPT_OSS = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
FAMILIES: Mapping[str, Family] = {
    "llama": Family(defaults=CONTEXT_2K),
    "mistral": Family(**NO_BIAS, defaults=MISTRAL),
    "ministral": Family(**NO_BIAS, defaults=MISTRAL),
    "mixtral": Family(
        **NO_BIAS, experts="block",
        defaults=EPS_5 | {
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "rope_theta": 1e6, "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "smollm3": Family(
        defaults=TIED | {
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "use_sliding_window": False, "rope_theta": 2e6,
        },
    ),
    "starcoder2": Family(
        norm_bias=True, plain_mlp=True,
        defaults=TIED | BIASED | {
            "num_key_value_heads": 2, "max_position_embeddings": 4096, "hidden_act": "gelu_pytorch_tanh",
        },
        fields=(("rms_norm_eps", "norm_epsilon"), ("attention_bias", "use_bias"), ("mlp_bias", "use_bias")),
        names=(("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj")),
    ),
    "gpt2": Family(
        norm_bias=True, plain_mlp=True, positions=True, transposed=True, fused_qkv=True, inner=4,
        unread=WHOLE_HEADS,
        defaults=TIED | BIASED | {"max_position_embeddings": 1024, "hidden_act": "gelu_new"},
        fields=(
            ("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"), ("num_attention_heads", "n_head"),
            ("max_position_embeddings", "n_positions"), ("intermediate_size", "n_inner"),
            ("hidden_act", "activation_function"), ("rms_norm_eps", "layer_norm_epsilon"),
        ),
        names=(
            ("model.layers.", "transformer.h."), ("model.embed_tokens", "transformer.wte"),
            ("model.embed_positions", "transformer.wpe"), ("model.norm", "transformer.ln_f"),
            ("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2"), ("self_attn.qkv_proj", "attn.c_attn"),
            ("self_attn.o_proj", "attn.c_proj"), ("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj"),
        ),
    ),
    "gpt_neox": Family(
        norm_bias=True, plain_mlp=True, fused_qkv=True, unread=WHOLE_HEADS,
        defaults=BIASED | CONTEXT_2K | {
            "hidden_act": "gelu", "partial_rotary_factor": 0.25, "use_parallel_residual": True,
        },
        fields=(EPS, ("partial_rotary_factor", "rotary_pct"), ("rope_theta", "rotary_emb_base")),
        names=(
            ("model.layers.", "gpt_neox.layers."), ("model.embed_tokens", "gpt_neox.embed_in"),
            ("model.norm", "gpt_neox.final_layer_norm"), ("lm_head", "embed_out"),
            ("self_attn.qkv_proj", "attention.query_key_value"), ("self_attn.o_proj", "attention.dense"),
            ("mlp.up_proj", "mlp.dense_h_to_4h"), ("mlp.down_proj", "mlp.dense_4h_to_h"),
        ),
    ),
    "falcon": FALCON,
    "falcon_40b": replace(
        FALCON, shared_norm=False,
        names=(*FALCON.names, ("input_layernorm", "ln_attn"), ("post_attention_layernorm", "ln_mlp")),
        in_gguf={"attention_norm": "attn_norm_2", "mlp_norm": "attn_norm"},
    ),
    "phi": Family(
        norms=NORMS_2[:1], norm_bias=True, plain_mlp=True, head_bias=True, qk_norm="head",
        defaults=NO_QK_NORM | BIASED | CONTEXT_2K | {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
        fields=(EPS, ("use_qk_norm", "qk_layernorm")),
        names=(
            ("self_attn.o_proj", "self_attn.dense"), ("mlp.up_proj", "mlp.fc1"), ("mlp.down_proj", "mlp.fc2"),
            ("model.norm", "model.final_layernorm"), *LAYERNORMS,
        ),
    ),
    "stablelm": Family(
        o_bias=False, norm_bias=True, shared_norm=True, qk_norm="apart", unread=WHOLE_HEADS[:1],
        defaults=NO_QK_NORM | EPS_5 | {
            "num_key_value_heads": 32, "max_position_embeddings": 4096, "partial_rotary_factor": 0.25,
        },
        fields=(EPS, ("attention_bias", "use_qkv_bias"), ("use_qk_norm", "qk_layernorm")), names=LAYERNORMS,
    ),
    "cohere": Family(
        norms=NORMS_2[:1], qk_norm="each", defaults=COHERE | {"rope_theta": 500000.0}, fields=(EPS,)
    ),
    "cohere2": Family(
        norms=NORMS_2[:1], window_every=4, defaults=COHERE | {"sliding_window": 4096}, fields=(EPS,)
    ),
    "nemotron": Family(
        norm_bias=True, plain_mlp=True,
        defaults=EPS_5 | {"max_position_embeddings": 4096, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
        fields=(("rms_norm_eps", "norm_eps"),),
    ),
    "granite": Family(defaults=CONTEXT_2K),
    "granitemoe": Family(
        experts="fused", defaults=CONTEXT_2K | {"num_local_experts": 8, "num_experts_per_tok": 2}
    ),
    "olmoe": Family(
        qk_norm="full", experts="mlp",
        defaults=EPS_5 | {"max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8},
    ),
    "olmo2": Family(qk_norm="full", norms=NORMS_BEHIND, defaults=EPS_5 | CONTEXT_2K),
    "olmo3": Family(
        qk_norm="full", norms=NORMS_BEHIND, window_every=4,
        defaults=EPS_5 | CONTEXT_2K | {"sliding_window": 4096, "rope_theta": 500000.0},
    ),
    "exaone4": Family(
        **NO_BIAS, qk_norm="head", norms=NORMS_BEHIND, window_every=4,
        defaults=EPS_5 | CONTEXT_2K | {"sliding_window": 4096},
    ),
    "qwen2": Family(qkv_bias=True, o_bias=False, defaults=QWEN),
    "qwen2_moe": Family(
        o_bias=False, experts="mlp", shared="gated", fields=(("attention_bias", "qkv_bias"),),
        defaults=QWEN_WINDOW | {
            "attention_bias": True, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen3": Family(qk_norm="head", defaults=QWEN | {"head_dim": 128}),
    "qwen3_moe": Family(
        qk_norm="head", experts="mlp",
        defaults={
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "use_sliding_window": False,
            "sliding_window": 4096, "num_local_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        },
    ),
    "qwen3_next": Family(qk_norm="head", experts="mlp", shared="gated", gated_attention=True, window_every=4),
    "qwen3_5_text": Family(qk_norm="head", gated_attention=True, split_linear=True, window_every=4),
    "qwen3_5_moe_text": Family(
        qk_norm="head", experts="mlp", shared="gated", gated_attention=True, split_linear=True, window_every=4
    ),
    "gemma": Family(defaults=GEMMA | {"num_key_value_heads": 16}),
    "gemma2": Family(norms=NORMS_4, window_every=2, defaults=GEMMA_2, fields=GEMMA_ACT),
    "gemma3_text": Family(norms=NORMS_4, qk_norm="head", window_every=6, defaults=GEMMA_3, fields=GEMMA_ACT),
    "gemma4_text": Family(own="gemma4", defaults=TIED | {"head_dim": 256}),
    "phi3": Family(
        **NO_BIAS, fused_qkv=True, fused_gate_up=True,
        defaults=EPS_5 | {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096},
    ),
    "glm": Family(o_bias=False, fused_gate_up=True, defaults=GLM),
    "glm4": Family(
        o_bias=False, fused_gate_up=True, defaults=GLM,
        norms=(
            *NORMS_2, ("attention_post_norm", "post_self_attn_layernorm"), ("mlp_post_norm", "post_mlp_layernorm"),
        ),
    ),
    "glm4_moe": Family(
        o_bias=False, qk_norm="head", experts="mlp", shared="sum", correction=True, defaults=NO_QK_NORM
    ),
    "glm4_moe_lite": DEEPSEEK_V3,
    "glm_moe_dsa": DEEPSEEK_V3,
    "deepseek_v2": replace(
        DEEPSEEK_V3, correction=False,
        defaults=LATENT | CONTEXT_2K | {
            "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407,
        },
    ),
    "deepseek_v3": replace(
        DEEPSEEK_V3,
        defaults=LATENT | {
            "max_position_embeddings": 4096, "first_k_dense_replace": 3, "n_routed_experts": 256, "n_group": 8,
            "topk_group": 4, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        },
    ),
    "deepseek_v32": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
    "kimi_k25": DEEPSEEK_V3,
    "gpt_oss": Family(
        experts="stacked", expert_bias=True, sinks=True, window_every=2, in_gguf={"mlp_norm": "post_attention_norm"},
        defaults=EPS_5 | {
            "attention_bias": True, "head_dim": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072,
            "sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4, "rope_theta": 150000.0,
            "rope_parameters": YARN_OF_GPT_OSS,
        },
    ),
    "qwen3_vl_text": Family(qk_norm="head", defaults=QWEN | {"head_dim": 128}),
    "qwen3_vl_moe_text": Family(qk_norm="head", experts="mlp", defaults={"num_key_value_heads": 16}),
    "llama4_text": Family(
        own="llama4",
        defaults=EPS_5 | {
            "head_dim": 128, "max_position_embeddings": 131072, "attention_chunk_size": 8192,
            "intermediate_size_mlp": 16384, "num_experts_per_tok": 1, "num_local_experts": 16,
            "num_key_value_heads": 8,
        },
    ),
    "gemma3n_text": Family(
        own="gemma3n", implied=implied.gemma3n, fields=GEMMA_ACT,
        defaults=TIED | {
            "head_dim": 256, "max_position_embeddings": 32768, "sliding_window": 512, "altup_num_inputs": 4,
            "laurel_rank": 64, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
            "num_kv_shared_layers": 15, "num_key_value_heads": 2,
        },
    ),
    "nemotron_h": Family(
        own="nemotron_h", implied=implied.nemotron_h,
        defaults={
            "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 4096, "intermediate_size": 21504,
            "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
            "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688, "num_experts_per_tok": 2,
        },
    ),
    "kimi_linear": Family(
        own="kimi_linear", implied=implied.kimi_linear, fields=(("max_position_embeddings", "model_max_length"),),
        defaults={
            "model_max_length": 1048576, "num_shared_experts": 1, "linear_head_dim": 128, "linear_num_heads": 32,
            "linear_conv_kernel_dim": 4, "num_experts": 256, "num_experts_per_token": 8,
        },
    ),
    "minimax": Family(own="minimax", implied=implied.minimax, defaults={"num_key_value_heads": 8} | CONTEXT_128K),
    "deepseek_v4": Family(
        own="deepseek_v4", implied=implied.deepseek_v4,
        defaults={
            "head_dim": 512, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "index_n_heads": 64,
            "index_head_dim": 128, "index_topk": 512, "sliding_window": 128, "hc_mult": 4, "n_routed_experts": 256,
            "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 2048,
            "max_position_embeddings": 1048576, "num_key_value_heads": 1,
        },
    ),
    "minimax_m2": Family(**NO_BIAS, qk_norm="full", experts="block", correction=True),
}  # fmt: skip
# What GGUF files call a family, where that is not its `model_type`; of two with one name, that which can do more.
IN_GGUF = {
    "command-r": "cohere", "deepseek2": "deepseek_v2", "gemma3": "gemma3_text", "gpt-oss": "gpt_oss",
    "gptneox": "gpt_neox", "olmo2": "olmo3", "phi2": "phi", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe",
}  # fmt: skip
# Multimodal wrappers and renamed checkpoints: the language model inside is planned, the encoder is not.
RENAMED = {
    "minimax_text_01": "minimax", "minimax_m1": "minimax", "MiniMaxText01": "minimax", "MiniMaxM1": "minimax",
    "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "gemma3": "gemma3_text", "gemma4": "gemma4_text",
}  # fmt: skip


def family_in_gguf(architecture: str) -> Family:
    """What GGUF files call `architecture`; of one that is not listed, the common decoder."""
    return FAMILIES.get(IN_GGUF.get(architecture, architecture), Family())


WRAPPED = ("text_config", "llm_config", "language_config")  # where wrappers keep their language model's config
INHERITED = ("model_type", "quantization_config", "bos_token_id", "eos_token_id")  # what some say outside only


def language_model(fields: Fields) -> Fields:
    """The language model's own fields, of a config that may wrap it (`text_config`): its `model_type` as `FAMILIES`
    calls it, and what that family takes for fields that are left out."""
    wrapped = next(filter(fields.has, WRAPPED), None)
    if wrapped is not None:
        inner = fields.group(wrapped)
        outside = {key: fields.values[key] for key in INHERITED if key in fields.values}
        tied = {key: fields.values[key] for key in ("tie_word_embeddings",) if fields.has(key)}  # the whole's counts
        fields = Fields({**outside, **inner.values, **tied}, inner.where, fields.error)
    name = fields.values.get("model_type")
    name = RENAMED.get(name, name) if isinstance(name, str) else name
    if name == "falcon" and fields.flag("new_decoder_architecture") and fields.values.get(FALCON_NORMS, 2) in (None, 2):
        name = "falcon_40b"
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        return fields
    own = {ours: theirs for ours, theirs in family.fields if theirs in fields.values}
    return Fields(family.complete(fields.values) | {"model_type": name}, fields.where, fields.error, own)


def open_config(raw: Any) -> tuple[str, Family, Fields]:
    """(model_type, family, fields) of the language model in a parsed config.json, or in its `Fields`.

    Raises:
        BadInput, or what the fields raise: not a config of a language model this planner knows.
    """
    if not isinstance(raw, (Mapping, Fields)):
        raise BadInput("config.json", "not a JSON object")
    fields = language_model(raw if isinstance(raw, Fields) else Fields(raw, "config.json", BadInput))
    model_type = fields.values.get("model_type")
    if not isinstance(model_type, str):
        raise fields.fault("model_type", f"missing; accepted: {', '.join(sorted(FAMILIES))}")
    if model_type not in FAMILIES:
        raise fields.fault(
            "model_type",
            f"{model_type!r} is not a language model this planner knows; accepted: {', '.join(sorted(FAMILIES))}",
        )
    return model_type, FAMILIES[model_type], fields
