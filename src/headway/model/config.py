"""The sizes and constants of a decoder, as a config.json or a GGUF states them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headway.core.errors import shown
from headway.core.fields import MAX_CONTEXT, MAX_HEADS, Fields
from headway.model.checkpoint import Checkpoint
from headway.model.rope import RopeConfig, rope_from_gguf, rope_from_hf
from headway.ops.weight import Weight


@dataclass(frozen=True)
class DecoderConfig:
    """What defines a decoder of the Llama kind, whatever file it came from.

    Attributes:
        layers, heads, kv_heads, head_dim, hidden_size, intermediate_size, vocab_size: sizes.
        context_length: most positions the model was made for.
        norm_eps: added to the mean square in every norm.
        rope: its rotary positions.
        tied: logits use the embedding table.
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
    rope: RopeConfig
    tied: bool = False

    @property
    def q_width(self) -> int:
        """Numbers of a token's queries in a layer."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers of a token's keys in a layer, and of its values."""
        return self.kv_heads * self.head_dim


# Fields of a config.json that would change the arithmetic, and the only values that change nothing.
_NEUTRAL = {
    "hidden_act": ("silu", "swish"), "mlp_bias": (False,), "quantization_config": (),
    "partial_rotary_factor": (1, 1.0), "num_local_experts": (0,), "num_experts": (0,), "attn_logit_softcapping": (),
    "final_logit_softcapping": (), "logits_scaling": (1, 1.0), "residual_multiplier": (1, 1.0),
    "embedding_multiplier": (1, 1.0), "rope_interleaved": (False,),
}  # fmt: skip

# All that a GGUF may say in its architecture's namespace; anything else might change the arithmetic.
_GGUF_KEYS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "tensor_data_layout",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length",
    "attention.value_length", "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scale_linear", "expert_count",
    "expert_used_count",
}  # fmt: skip


def decoder_config(
    checkpoint: Checkpoint, hf_defaults: Mapping[str, int] | None = None, gguf_interleaved: bool = False
) -> DecoderConfig:
    """The config of a checkpoint.

    Args:
        hf_defaults: what the family's class in transformers takes for a field that config.json leaves out.
        gguf_interleaved: rows of queries and keys are permuted in its GGUF files, so that rotary pairs are neighbours.

    Raises:
        ModelFileError: a field is missing, mistyped, or asks for what no family here does.
    """
    fields = checkpoint.config
    if checkpoint.gguf:
        config = _from_gguf(fields, checkpoint.architecture, checkpoint.tensors, gguf_interleaved)
    else:
        stated = {name: value for name, value in fields.values.items() if value is not None}
        config = _from_hf(Fields({**(hf_defaults or {}), **stated}, fields.where, fields.error))
    if config.heads % config.kv_heads:
        raise fields.fault("attention heads", f"{config.heads} is not a multiple of {config.kv_heads} key/value heads")
    if config.head_dim % 2:
        raise fields.fault("head size", f"{config.head_dim} is odd; rotary positions need pairs")
    return config


def has_attention_biases(checkpoint: Checkpoint) -> bool:
    """Whether the projections of attention have biases, in families that leave it to the checkpoint."""
    if checkpoint.gguf:
        return "blk.0.attn_q.bias" in checkpoint.tensors
    return checkpoint.config.flag("attention_bias", False)


def _from_hf(fields: Fields) -> DecoderConfig:
    for name, accepted in _NEUTRAL.items():
        if fields.has(name) and fields.values[name] not in accepted:
            raise fields.fault(name, f"{shown(fields.values[name])} is not supported for this kind of model")
    if fields.has("sliding_window") and fields.flag("use_sliding_window", True):
        raise fields.fault("sliding_window", f"{shown(fields.values['sliding_window'])} is not supported")
    layers = fields.size("num_hidden_layers")
    for kind in fields.words("layer_types", layers) or ():
        if kind != "full_attention":
            raise fields.fault("layer_types", f"{shown(kind)} is not supported; full_attention is")
    hidden_size, heads = fields.size("hidden_size"), fields.size("num_attention_heads", most=MAX_HEADS)
    return DecoderConfig(
        layers=layers,
        heads=heads,
        kv_heads=fields.size("num_key_value_heads", default=heads),
        head_dim=fields.size("head_dim", default=hidden_size // heads or 1),
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        vocab_size=fields.size("vocab_size"),
        context_length=fields.size("max_position_embeddings", default=2048, most=MAX_CONTEXT),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope_from_hf(fields),
        tied=fields.flag("tie_word_embeddings", False),
    )


def _from_gguf(fields: Fields, architecture: str, tensors: Mapping[str, Weight], interleaved: bool) -> DecoderConfig:
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in fields.values.items() if key.startswith(prefix)}
    named = Fields(own, f"{fields.where}: {architecture}", fields.error)
    for key in own.keys() - _GGUF_KEYS:
        raise named.fault(key, "this setting is not known for this kind of model")
    if own.get("expert_count", 0) != 0:
        raise named.fault("expert_count", "mixtures of experts are not supported")
    hidden_size, heads = named.size("embedding_length"), named.size("attention.head_count", most=MAX_HEADS)
    head_dim = named.size("attention.key_length", default=hidden_size // heads or 1)
    for key in ("attention.value_length", "rope.dimension_count"):
        if named.size(key, default=head_dim) != head_dim:
            raise named.fault(key, f"{own[key]} differs from the head size {head_dim}; that is not supported")
    table = tensors.get("token_embd.weight")
    return DecoderConfig(
        layers=named.size("block_count"),
        heads=heads,
        kv_heads=named.size("attention.head_count_kv", default=heads),
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=named.size("feed_forward_length"),
        vocab_size=named.size("vocab_size", default=table.shape[0] if table is not None else None),
        context_length=named.size("context_length", most=MAX_CONTEXT),
        norm_eps=named.number("attention.layer_norm_rms_epsilon"),
        rope=rope_from_gguf(named, tensors, head_dim, interleaved),
        tied="output.weight" not in tensors,
    )
