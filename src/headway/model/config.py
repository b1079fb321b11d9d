"""The sizes and constants of a decoder, as a config.json or a GGUF states them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headway.core.errors import shown
from headway.core.fields import MAX_CONTEXT, MAX_HEADS, Fields
from headway.model.checkpoint import Checkpoint
from headway.model.rope import rope_from_gguf, rope_from_hf, scaled_context
from headway.ops.protocol import Rope
from headway.shape.families import family_in_gguf


@dataclass(frozen=True)
class DecoderConfig:
    """What defines a decoder, whatever file it came from.

    Attributes:
        layers, heads, kv_heads, head_dim, hidden_size, intermediate_size, vocab_size: sizes.
        context_length: most positions the model was made for.
        norm_eps: added to the mean square, or the variance, in every norm.
        rope: its rotary positions.
        permuted: its file keeps rows of queries and keys in another order than folders: rotary pairs are neighbours.
        activation: of the MLP, as operations call it.
        tied: logits use the embedding table.
        layer_norms: norms take the mean away first.
        unrotated: layers without positions.
        windowed: layers that look back no further than their window, which is their KV group's to know.
        sparse: layers with experts.
        local_rope: rotary positions of those with windows; None = as the others'.
        attention_scale: of queries times keys; None = 1 / sqrt(head_dim). by_layer: the scale is divided by the layer's
            number, from 1.
        embedding_scale, logit_scale: factors on embeddings and logits.
        score_softcap, logit_softcap: c of c * tanh(x / c), on scores and logits; 0 = none.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: Rope
    permuted: bool = False
    activation: str = "silu"
    tied: bool = False
    layer_norms: bool = False
    unrotated: frozenset[int] = frozenset()
    windowed: frozenset[int] = frozenset()
    sparse: frozenset[int] = frozenset()
    local_rope: Rope | None = None
    attention_scale: float | None = None
    scale_by_layer: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    score_softcap: float = 0.0
    logit_softcap: float = 0.0

    def scale_of(self, layer: int) -> float:
        """What a layer's scores are multiplied by."""
        scale = self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale
        return scale / (layer + 1) if self.scale_by_layer else scale

    def rope_of(self, layer: int) -> Rope:
        """The rope of a layer."""
        if layer in self.unrotated:
            return Rope(())
        return self.local_rope if self.local_rope and layer in self.windowed else self.rope

    @property
    def q_width(self) -> int:
        """Numbers of a token's queries in a layer."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers of a token's keys in a layer, and of its values."""
        return self.kv_heads * self.head_dim


# Fields of a config.json that change the arithmetic of some family, and the values that change nothing. A family's
# `Conventions` names those that it carries out; of any other only these values are accepted.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "mlp_bias": (False,), "partial_rotary_factor": (1,), "num_local_experts": (0,),
    "num_experts": (0,), "attn_logit_softcapping": (), "final_logit_softcapping": (), "logits_scaling": (1,),
    "residual_multiplier": (1,), "embedding_multiplier": (1,), "rope_interleaved": (False,), "sliding_window": (),
    "attention_multiplier": (), "query_pre_attn_scalar": (), "use_bidirectional_attention": (False,),
    "clip_qkv": (), "alibi": (False,),
}  # fmt: skip

# Key in a GGUF's architecture namespace -> the field of a config.json that says the same.
GGUF_FIELDS = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip

# What else a GGUF may say there without changing the arithmetic, or is read with the rope.
_GGUF_KEYS = {
    "tensor_data_layout", "attention.value_length", "rope.freq_base", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scale_linear",
    "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "expert_count", "expert_used_count", "pooling_type", "classifier.output_labels",
}  # fmt: skip

# Activation, as config.json calls it -> as operations do.
ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "relu": "relu", "relu2": "relu2",
    "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
}  # fmt: skip


@dataclass(frozen=True)
class Conventions:
    """How the files of a family say what a decoder is; `shape.families` has what its config.json may leave out.

    Attributes:
        understood: fields of `NEUTRAL` that the family carries out, whatever their value.
        layer_norms: its norms take the mean away first.
        rotary: positions are rotary; else the model has a table of them.
        interleaved: rotary pairs are neighbours, in folders too.
        gguf: further keys of this family's GGUF files -> the field of config.json that says the same.
        gguf_interleaved: rows of queries and keys are permuted in its GGUF files, so that rotary pairs are neighbours.
    """

    understood: frozenset[str] = frozenset()
    gguf: Mapping[str, str] = field(default_factory=dict)
    gguf_interleaved: bool = False
    layer_norms: bool = False
    rotary: bool = True
    interleaved: bool = False


def stated(checkpoint: Checkpoint, conventions: Conventions = Conventions()) -> Fields:
    """What a checkpoint of either kind says, under Llama's names in config.json; faults have the file's own names. What
    a family has beyond `DecoderConfig` is read from here.

    Raises:
        ModelFileError: something is asked for that the family does not carry out.
    """
    fields = _stated_by_gguf(checkpoint, conventions) if checkpoint.gguf else checkpoint.config
    for name in NEUTRAL.keys() - conventions.understood:
        if fields.has(name) and fields.values[name] not in NEUTRAL[name]:
            if name == "sliding_window" and not fields.flag("use_sliding_window", True):
                continue
            raise fields.fault(name, f"{shown(fields.values[name])} is not supported for this kind of model")
    return fields


def decoder_config(checkpoint: Checkpoint, conventions: Conventions = Conventions()) -> DecoderConfig:
    """The config of a checkpoint of a family with these conventions.

    Raises:
        ModelFileError: a field is missing, mistyped, or asks for what the family does not do.
    """
    fields = stated(checkpoint, conventions)
    layers, tensors = fields.size("num_hidden_layers"), len(checkpoint.tensors)
    if layers > tensors:  # before anything is built per layer: the count is the file's word
        raise fields.fault("num_hidden_layers", f"{layers} layers but only {tensors} tensors")
    kinds = ("full_attention", *["sliding_attention"] * ("sliding_window" in conventions.understood))
    for kind in fields.words("layer_types", layers) or ():
        if kind not in kinds:
            raise fields.fault("layer_types", f"{shown(kind)} is not supported; accepted: {', '.join(kinds)}")
    context = fields.size("max_position_embeddings", most=MAX_CONTEXT)
    hidden_size, heads = fields.size("hidden_size"), fields.size("num_attention_heads", most=MAX_HEADS)
    kv_heads = fields.size("num_key_value_heads", default=heads)
    head_dim = fields.size("head_dim", default=hidden_size // heads or 1)
    if heads % kv_heads:
        raise fields.fault("num_attention_heads", f"{heads} is not a multiple of {kv_heads} key/value heads")
    if head_dim % 2:
        raise fields.fault("head_dim", f"{head_dim} is odd; rotary positions need pairs")
    return DecoderConfig(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        vocab_size=fields.size("vocab_size"),
        context_length=context if checkpoint.gguf or not conventions.rotary else scaled_context(fields, context),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(checkpoint, fields, head_dim, conventions),
        permuted=checkpoint.gguf and conventions.gguf_interleaved,
        activation=_activation(fields),
        layer_norms=conventions.layer_norms,
        tied=fields.flag("tie_word_embeddings", False),
        windowed=frozenset(
            layer for group in checkpoint.shape("").groups if group.kind == "window" for layer in group.layers
        ),
    )


def optional_number(fields: Fields, name: str, otherwise: float) -> float:
    """A number that may be missing or null."""
    return fields.number(name) if fields.has(name) else otherwise


def _activation(fields: Fields) -> str:
    name = fields.text("hidden_act", None if "hidden_act" in fields.values else "silu")  # null is no activation
    if name not in ACTIVATIONS:
        raise fields.fault("hidden_act", f"{shown(name)} is not supported; {', '.join(ACTIVATIONS)} are")
    return ACTIVATIONS[name]


def _rope(checkpoint: Checkpoint, fields: Fields, head_dim: int, conventions: Conventions) -> Rope:
    if not conventions.rotary:
        return Rope(())
    if checkpoint.gguf:
        interleaved = conventions.interleaved or conventions.gguf_interleaved
        return rope_from_gguf(_namespace(checkpoint), checkpoint.tensors, head_dim, interleaved)
    found = rope_from_hf(fields, head_dim, partial="partial_rotary_factor" in conventions.understood)
    return replace(found, interleaved=conventions.interleaved)


def _stated_by_gguf(checkpoint: Checkpoint, conventions: Conventions) -> Fields:
    fields, tensors = _namespace(checkpoint), checkpoint.tensors
    names = GGUF_FIELDS | ({"attention.layer_norm_epsilon": "rms_norm_eps"} if conventions.layer_norms else {})
    names |= conventions.gguf
    for key in fields.values.keys() - names.keys() - _GGUF_KEYS:
        raise fields.fault(key, "this setting is not known for this kind of model")
    if fields.values.get("expert_count", 0) != 0 and "num_experts" not in conventions.understood:
        raise fields.fault("expert_count", "mixtures of experts are not supported for this kind of model")
    hidden_size, heads = fields.size("embedding_length"), fields.size("attention.head_count", most=MAX_HEADS)
    head_dim = fields.size("attention.key_length", default=hidden_size // heads or 1)
    for key in ("attention.value_length", "rope.dimension_count"):
        if key == "rope.dimension_count" and "partial_rotary_factor" in conventions.understood:
            continue  # the rope's to read
        if fields.size(key, default=head_dim) != head_dim:
            raise fields.fault(
                key, f"{fields.values[key]} differs from the head size {head_dim}; that is not supported"
            )
    # What files never say is as the family has it, or as their tensors show.
    defaults = family_in_gguf(checkpoint.architecture).defaults
    implied: dict[str, Any] = {
        "head_dim": head_dim, "hidden_act": defaults.get("hidden_act", "silu"),
        "tie_word_embeddings": "output.weight" not in tensors, "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "attention_bias": not tensors.keys().isdisjoint({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"}),
    }  # fmt: skip
    if "use_qk_norm" in defaults:
        implied["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors
    if "token_embd.weight" in tensors:
        implied["vocab_size"] = tensors["token_embd.weight"].shape[0]
    values = {ours: fields.values[key] for key, ours in names.items() if fields.has(key)}
    return Fields({**implied, **values}, fields.where, fields.error, {ours: key for key, ours in names.items()})


def _namespace(checkpoint: Checkpoint) -> Fields:
    """The keys of a GGUF's architecture."""
    prefix, fields = f"{checkpoint.architecture}.", checkpoint.config
    own = {key.removeprefix(prefix): value for key, value in fields.values.items() if key.startswith(prefix)}
    return Fields(own, f"{fields.where}: {checkpoint.architecture}", fields.error)
