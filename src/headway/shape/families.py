"""Model families as `config.json` names them: what each one adds to the common decoder, and how its layers alternate.

One row per `model_type`. The tensor inventory (`tensors.py`) and the KV groups (`config.py`) read nothing else, so a
new family of the common kind is a new row. Checked tensor by tensor against checkpoints written by `transformers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.core.errors import BadInput
from headway.core.fields import Fields

NORMS_2 = ("input_layernorm", "post_attention_layernorm")
NORMS_4 = (*NORMS_2, "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True)
class Family:
    """Traits of a family.

    Attributes:
        qkv_bias, o_bias: True, False, or None = as the config's `attention_bias` says.
        qkv_bias_field: what says otherwise where `qkv_bias` is not None.
        qk_norm: "" none, "head" one per head width, "full" over all heads, "config" = head if `use_qk_norm`.
        norms: the layer's norms of width d.
        fused_qkv, fused_gate_up: stored as one matrix.
        experts: how routed experts are stored: "" none, "mlp" (mlp.experts.N.gate_proj), "block" (Mixtral's w1..w3),
            "stacked" (one tensor for all, with biases: gpt-oss). "gemma4": the family is listed by `gemma4.py`.
        router_bias: the router carries a correction bias per expert.
        shared: how shared experts are stored: "", "sum" (n_shared_experts wide), "gated" (one, with its own gate).
        sinks: one learned sink per head. gated_attention: the query projection also makes an output gate.
        split_linear: linear attention keeps its projections as four matrices instead of two.
        tied, head_dim, window_every: defaults of the config class, where public configs leave the key out. A layer is
            full if (index + 1) % window_every == 0, else a window (`linear` attention for the hybrid families).
        defaults: what the config class in transformers takes for further fields that config.json leaves out.
    """

    qkv_bias: bool | None = None
    qkv_bias_field: str = "attention_bias"
    o_bias: bool | None = None
    qk_norm: str = ""
    norms: tuple[str, ...] = NORMS_2
    fused_qkv: bool = False
    fused_gate_up: bool = False
    experts: str = ""
    router_bias: bool = False
    shared: str = ""
    sinks: bool = False
    gated_attention: bool = False
    split_linear: bool = False
    tied: bool = False
    head_dim: int | None = None
    window_every: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def complete(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """A config's fields with those that it leaves out; null stays null."""
        own: dict[str, Any] = {"tie_word_embeddings": True} if self.tied else {}
        own |= {"head_dim": self.head_dim} if self.head_dim else {}
        return own | dict(self.defaults) | dict(values)


QWEN = {
    "num_key_value_heads": 32, "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28,
}  # fmt: skip
GEMMA = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 26, "sliding_window": 4096, "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
GEMMA_2 = GEMMA | {
    "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
}  # fmt: skip
GEMMA_3 = GEMMA | {
    "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
}  # fmt: skip
DEEPSEEK_V3 = Family(experts="mlp", shared="sum", router_bias=True)
FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(
        qkv_bias=False, o_bias=False,
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "ministral": Family(qkv_bias=False, o_bias=False),
    "mixtral": Family(qkv_bias=False, o_bias=False, experts="block"),
    "smollm3": Family(tied=True),
    "granite": Family(),
    "olmoe": Family(qk_norm="full", experts="mlp"),
    "olmo2": Family(qk_norm="full", norms=("post_attention_layernorm", "post_feedforward_layernorm")),
    "qwen2": Family(qkv_bias=True, o_bias=False, defaults=QWEN),
    "qwen2_moe": Family(
        qkv_bias=True, qkv_bias_field="qkv_bias", o_bias=False, experts="mlp", shared="gated"),
    "qwen3": Family(qk_norm="head", head_dim=128, defaults=QWEN),
    "qwen3_moe": Family(qk_norm="head", experts="mlp"),
    "qwen3_next": Family(qk_norm="head", experts="mlp", shared="gated", gated_attention=True, window_every=4),
    "qwen3_5_text": Family(qk_norm="head", gated_attention=True, split_linear=True, window_every=4),
    "qwen3_5_moe_text": Family(
        qk_norm="head", experts="mlp", shared="gated", gated_attention=True, split_linear=True, window_every=4
    ),
    "gemma": Family(tied=True, head_dim=256),
    "gemma2": Family(norms=NORMS_4, tied=True, head_dim=256, window_every=2, defaults=GEMMA_2),
    "gemma3_text": Family(
        norms=NORMS_4, qk_norm="head", tied=True, head_dim=256, window_every=6, defaults=GEMMA_3
    ),
    "gemma4_text": Family(tied=True, head_dim=256, experts="gemma4"),
    "phi3": Family(qkv_bias=False, o_bias=False, fused_qkv=True, fused_gate_up=True),
    "glm": Family(o_bias=False, fused_gate_up=True),
    "glm4": Family(
        o_bias=False, fused_gate_up=True, norms=(*NORMS_2, "post_self_attn_layernorm", "post_mlp_layernorm")
    ),
    "glm4_moe": Family(o_bias=False, qk_norm="config", experts="mlp", shared="sum", router_bias=True),
    "glm4_moe_lite": DEEPSEEK_V3,
    "glm_moe_dsa": DEEPSEEK_V3,
    "deepseek_v2": Family(experts="mlp", shared="sum"),
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
    "kimi_k25": DEEPSEEK_V3,
    "gpt_oss": Family(experts="stacked", sinks=True, window_every=2, head_dim=64, qkv_bias=True, o_bias=True),
    "minimax_m2": Family(qkv_bias=False, o_bias=False, qk_norm="full", experts="block", router_bias=True),
}  # fmt: skip
# Multimodal wrappers and renamed checkpoints: the language model inside is planned, the encoder is not.
RENAMED = {
    "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "gemma3": "gemma3_text", "gemma4": "gemma4_text",
}  # fmt: skip


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
    family = FAMILIES.get(name) if isinstance(name, str) else None
    values = fields.values if family is None else family.complete(fields.values) | {"model_type": name}
    return Fields(values, fields.where, fields.error)


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
