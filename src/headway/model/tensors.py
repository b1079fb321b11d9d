"""The tensors that families are put together from: their names in each kind of file, their shapes and parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.model.checkpoint import Checkpoint
from headway.model.config import DecoderConfig, has_attention_biases
from headway.ops.weight import Weight

Layers = Mapping[str, "TensorSpec"] | Sequence[Mapping[str, "TensorSpec"]]  # of every layer alike, or of each
Cut = Callable[[Weight, Any], Mapping[str, Weight]]  # a tensor -> the weights that are in it, by role


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a family, in one layer or beside the layers.

    Attributes:
        hf, gguf: its name in a Hugging Face folder and in a GGUF.
        part: which it plays in a step, a field of `ByPart`.
        dims: its shape, (out, in) of a matrix, as names of `DecoderConfig`'s widths.
        cut: what forward passes know it as, where that is not the tensor itself under its role.
    """

    hf: str
    gguf: str
    part: str
    dims: tuple[str, ...]
    cut: Cut | None = None

    def name(self, gguf: bool) -> str:
        return self.gguf if gguf else self.hf

    def shape(self, config: DecoderConfig) -> tuple[int, ...]:
        return tuple(getattr(config, width) for width in self.dims)


def _spec(hf: str, gguf: str, part: str, *dims: str, cut: Cut | None = None) -> TensorSpec:
    return TensorSpec(hf, gguf, part, dims, cut)


# By role: what forward passes know a tensor as.
BESIDE_LAYERS = {
    "embed": _spec("model.embed_tokens.weight", "token_embd.weight", "embed", "vocab_size", "hidden_size"),
    "norm": _spec("model.norm.weight", "output_norm.weight", "norm", "hidden_size"),
    "head": _spec("lm_head.weight", "output.weight", "head", "vocab_size", "hidden_size"),
}
LAYER = {
    "attention_norm": _spec("input_layernorm.weight", "attn_norm.weight", "norm", "hidden_size"),
    "q": _spec("self_attn.q_proj.weight", "attn_q.weight", "attention", "q_width", "hidden_size"),
    "k": _spec("self_attn.k_proj.weight", "attn_k.weight", "attention", "kv_width", "hidden_size"),
    "v": _spec("self_attn.v_proj.weight", "attn_v.weight", "attention", "kv_width", "hidden_size"),
    "o": _spec("self_attn.o_proj.weight", "attn_output.weight", "attention", "hidden_size", "q_width"),
    "mlp_norm": _spec("post_attention_layernorm.weight", "ffn_norm.weight", "norm", "hidden_size"),
    "gate": _spec("mlp.gate_proj.weight", "ffn_gate.weight", "mlp", "intermediate_size", "hidden_size"),
    "up": _spec("mlp.up_proj.weight", "ffn_up.weight", "mlp", "intermediate_size", "hidden_size"),
    "down": _spec("mlp.down_proj.weight", "ffn_down.weight", "mlp", "hidden_size", "intermediate_size"),
}
QKV_BIASES = {
    "q_bias": _spec("self_attn.q_proj.bias", "attn_q.bias", "attention", "q_width"),
    "k_bias": _spec("self_attn.k_proj.bias", "attn_k.bias", "attention", "kv_width"),
    "v_bias": _spec("self_attn.v_proj.bias", "attn_v.bias", "attention", "kv_width"),
}
O_BIAS = {"o_bias": _spec("self_attn.o_proj.bias", "attn_output.bias", "attention", "hidden_size")}
QK_NORMS = {
    "q_norm": _spec("self_attn.q_norm.weight", "attn_q_norm.weight", "norm", "head_dim"),
    "k_norm": _spec("self_attn.k_norm.weight", "attn_k_norm.weight", "norm", "head_dim"),
}
FULL_QK_NORMS = {
    "q_norm": _spec("self_attn.q_norm.weight", "attn_q_norm.weight", "norm", "q_width"),
    "k_norm": _spec("self_attn.k_norm.weight", "attn_k_norm.weight", "norm", "kv_width"),
}
MLP_BIASES = {
    "gate_bias": _spec("mlp.gate_proj.bias", "ffn_gate.bias", "mlp", "intermediate_size"),
    "up_bias": _spec("mlp.up_proj.bias", "ffn_up.bias", "mlp", "intermediate_size"),
    "down_bias": _spec("mlp.down_proj.bias", "ffn_down.bias", "mlp", "hidden_size"),
}
# Norms of what attention and MLP make, before it is added. Where a layer has these, post_attention_layernorm is one.
POST_NORMS = {
    "attention_post_norm": _spec(
        "post_attention_layernorm.weight", "post_attention_norm.weight", "norm", "hidden_size"
    ),
    "mlp_post_norm": _spec("post_feedforward_layernorm.weight", "post_ffw_norm.weight", "norm", "hidden_size"),
}
PRE_MLP_NORM = {"mlp_norm": _spec("pre_feedforward_layernorm.weight", "ffn_norm.weight", "norm", "hidden_size")}
NORM_BIASES = {
    "attention_norm_bias": _spec("input_layernorm.bias", "attn_norm.bias", "norm", "hidden_size"),
    "mlp_norm_bias": _spec("post_attention_layernorm.bias", "ffn_norm.bias", "norm", "hidden_size"),
}
LAST_NORM_BIAS = {"norm_bias": _spec("model.norm.bias", "output_norm.bias", "norm", "hidden_size")}
MATRICES = {role: spec for role, spec in LAYER.items() if spec.part != "norm"}


def attention_biases(checkpoint: Checkpoint) -> dict[str, TensorSpec]:
    """Those of all four projections, or none, in families that leave it to the checkpoint."""
    return QKV_BIASES | O_BIAS if has_attention_biases(checkpoint) else {}


def without(specs: Mapping[str, TensorSpec], *roles: str) -> dict[str, TensorSpec]:
    """All but the tensors of these roles."""
    return {role: spec for role, spec in specs.items() if role not in roles}


def tensors_of(
    config: DecoderConfig,
    layer: Layers = LAYER,
    beside: Mapping[str, TensorSpec] = BESIDE_LAYERS,
) -> dict[str, TensorSpec]:
    """Role -> tensor of a whole model whose layers hold `layer`, each its own if there are several; the role of layer
    3's "q" is "3.q"."""
    specs = {role: spec for role, spec in beside.items() if not (role == "head" and config.tied)}
    for number in range(config.layers):
        for role, spec in (layer if isinstance(layer, Mapping) else layer[number]).items():
            hf, gguf = f"model.layers.{number}.{spec.hf}", f"blk.{number}.{spec.gguf}"
            specs[f"{number}.{role}"] = replace(spec, hf=hf, gguf=gguf)
    return specs
