"""What makes tiny checkpoints of the families with experts or latent attention, every field away from its default."""

from __future__ import annotations

from typing import Any

SMALL = {"num_experts_per_tok": 2, "num_hidden_layers": 3}
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 20.0,
    "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.8,
}  # fmt: skip
DEEPSEEK = SMALL | {
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
    "kv_lora_rank": 36, "qk_rope_head_dim": 8, "qk_nope_head_dim": 20, "v_head_dim": 12, "first_k_dense_replace": 1,
    "n_shared_experts": 2, "routed_scaling_factor": 1.7,
}  # fmt: skip
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": SMALL | {"model_type": "mixtral", "num_local_experts": 5, "head_dim": 24, "sliding_window": 24},
    "qwen2_moe": SMALL | {
        "model_type": "qwen2_moe", "num_experts": 6, "moe_intermediate_size": 40, "decoder_sparse_step": 2,
        "shared_expert_intermediate_size": 72, "norm_topk_prob": True, "qkv_bias": False, "use_sliding_window": True,
        "sliding_window": 20, "max_window_layers": 2,
    },
    "qwen2_moe listed": SMALL | {
        "model_type": "qwen2_moe", "num_experts": 6, "moe_intermediate_size": 40, "mlp_only_layers": [1],
        "shared_expert_intermediate_size": 72, "tie_word_embeddings": True,
    },
    "qwen3_moe": SMALL | {
        "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "norm_topk_prob": True, "head_dim": 24, "attention_bias": True, "use_sliding_window": True,
        "sliding_window": 50,
    },
    "qwen3_moe listed": SMALL | {
        "model_type": "qwen3_moe", "num_experts": 6, "moe_intermediate_size": 40, "mlp_only_layers": [0, 2],
        "head_dim": 16, "tie_word_embeddings": True,
    },
    "olmoe": SMALL | {"model_type": "olmoe", "num_experts": 6, "norm_topk_prob": True, "pad_token_id": 0},
    "gpt_oss": SMALL | {
        "model_type": "gpt_oss", "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 24, "sliding_window": 20,
        "swiglu_alpha": 1.4, "swiglu_limit": 0.7, "rope_parameters": YARN | {"truncate": False},
    },
    "gpt_oss no biases": SMALL | {
        "model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 16, "attention_bias": False,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 33,
    },
    "granitemoe": SMALL | {
        "model_type": "granitemoe", "num_local_experts": 6, "embedding_multiplier": 3.0, "logits_scaling": 2.0,
        "residual_multiplier": 0.6, "attention_multiplier": 0.2, "attention_bias": True,
    },
    "deepseek_v2": DEEPSEEK | {"model_type": "deepseek_v2", "q_lora_rank": None},
    "deepseek_v2 groups": DEEPSEEK | {
        "model_type": "deepseek_v2", "q_lora_rank": 28, "topk_method": "group_limited_greedy", "n_group": 4,
        "topk_group": 2, "rope_parameters": YARN, "attention_bias": True, "mlp_bias": True,
    },
    "deepseek_v3": DEEPSEEK | {
        "model_type": "deepseek_v3", "q_lora_rank": 28, "n_group": 4, "topk_group": 2, "rope_parameters": YARN,
    },
    "deepseek_v3 halves": DEEPSEEK | {
        "model_type": "deepseek_v3", "q_lora_rank": None, "n_group": 2, "topk_group": 1, "rope_interleave": False,
        "norm_topk_prob": False, "attention_bias": True, "num_experts_per_tok": 2, "first_k_dense_replace": 2,
    },
}  # fmt: skip
