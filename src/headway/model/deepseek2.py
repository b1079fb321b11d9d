"""DeepSeek V2 and V3 in GGUF files, which call both deepseek2 and say by figures what tells them apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headway.core.fields import Fields
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions, decoder_config, stated
from headway.model.family import Decoder, decoder_of
from headway.model.latent import CUTS, build, latent
from headway.model.mixture import GGUF_KEYS, UNDERSTOOD, active_experts
from headway.ops.routing import Routing
from headway.shape.families import FAMILIES

KEYS = {
    "attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank",
    "attention.key_length_mla": "qk_head_dim", "attention.value_length_mla": "value_head_dim",
    "leading_dense_block_count": "first_k_dense_replace", "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor", "expert_weights_norm": "norm_topk_prob",
    "expert_gating_func": "gating", "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
    "rope.scaling.yarn_log_multiplier": "yarn_log_multiplier",
}  # fmt: skip
CONVENTIONS = Conventions(understood=UNDERSTOOD, gguf=GGUF_KEYS | KEYS)
SIGMOID = 2  # the gating function's number; 1 is the softmax


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: metadata or tensors are not those of a model this family runs.
    """
    turned = _headed(checkpoint)
    plain, fields = decoder_config(turned, CONVENTIONS), _completed(checkpoint, stated(turned, CONVENTIONS))
    plain = replace(plain, rope=replace(plain.rope, magnitude=1.0))  # YaRN's is in the scale of scores
    config = latent(checkpoint, plain, fields, _routing(fields), interleaved=True)
    corrected = any(f"blk.{number}.exp_probs_b.bias" in checkpoint.tensors for number in config.sparse)
    apart = "blk.0.attn_k_b.weight" in checkpoint.tensors
    family = replace(FAMILIES["deepseek_v2"], correction=corrected, apart=apart)
    return decoder_of(checkpoint, fields, config, build, family=family, cuts=CUTS)


def _headed(checkpoint: Checkpoint) -> Checkpoint:
    """With the turned part of a head as its size: what the file calls that is the width of the cache, or of a whole
    head in older files."""
    values = dict(checkpoint.config.values)
    prefix = f"{checkpoint.architecture}."
    for key in ("key_length", "value_length"):
        values[f"{prefix}attention.{key}"] = values.get(f"{prefix}rope.dimension_count")
    return replace(checkpoint, config=checkpoint.config.holding(values))


def _completed(checkpoint: Checkpoint, fields: Fields) -> Fields:
    """With the widths of a head's parts, and YaRN's parameters, as a config.json has them."""
    prefix, turned = f"{checkpoint.architecture}.", fields.size("head_dim")
    own = {key.removeprefix(prefix): value for key, value in checkpoint.config.values.items()}
    file = Fields(own, fields.where, fields.error)
    whole = file.size("attention.key_length_mla", "attention.key_length")
    if whole <= turned:
        raise file.fault("attention.key_length_mla", f"{whole} is not more than the {turned} that are turned")
    added: dict[str, Any] = {
        "qk_rope_head_dim": turned, "qk_nope_head_dim": whole - turned,
        "v_head_dim": file.size("attention.value_length_mla", "attention.value_length"),
    }  # fmt: skip
    if own.get("rope.scaling.type") == "yarn":
        added["rope_scaling"] = {
            "rope_type": "yarn", "factor": own.get("rope.scaling.factor"),
            "mscale_all_dim": 10 * fields.number("yarn_log_multiplier", 0.1),
        }  # fmt: skip
    return fields.holding({**fields.values, **added})


def _routing(fields: Fields) -> Routing:
    active = active_experts(fields)
    sigmoid = fields.values.get("gating", 1) == SIGMOID
    groups = fields.maybe("n_group") or 1
    return Routing(
        active,
        sigmoid=sigmoid,
        renormalise=fields.flag("norm_topk_prob", False),
        scale=fields.number("routed_scaling_factor", 1.0),
        groups=groups,
        kept_groups=fields.size("topk_group", default=groups),
        merit=2 if sigmoid else 1,
    )
