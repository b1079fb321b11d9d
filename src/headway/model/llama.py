"""The Llama family (2, 3, 3.1, 3.2; SmolLM and others of the same shape): config, tensor names, forward pass.

Pre-norm blocks of grouped-query attention with rotary positions and a SiLU-gated MLP (Touvron et al. 2023; Grattafiori
et al. 2024). Heads of a GGUF have their rows permuted so that rotary pairs are neighbours; that is the rope's
`interleaved`, not a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headway.core.fields import Fields
from headway.model.checkpoint import Checkpoint
from headway.model.family import Decoder
from headway.model.rope import Llama3Scaling, inverse_frequencies, llama3
from headway.ops.protocol import Forward, Ops, Prepared, Rope, Tensor
from headway.ops.weight import Weight
from headway.shape.model import KVGroup


@dataclass(frozen=True)
class LlamaConfig:
    """What defines a Llama, whatever file it came from.

    Attributes:
        layers, heads, kv_heads, head_dim, hidden_size, intermediate_size, vocab_size: sizes.
        context_length: most positions the model was made for.
        norm_eps: added to the mean square in every norm.
        rope_theta: base of the rotary frequencies.
        rope_linear: positions are divided by this (1 = no linear scaling).
        rope_llama3: Llama 3.1's scaling; None = none.
        rope_interleaved: rotary pairs are neighbours (GGUF).
        tied: logits use the embedding table.
        attention_bias: the four attention projections have biases.
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
    rope_theta: float
    rope_linear: float = 1.0
    rope_llama3: Llama3Scaling | None = None
    rope_interleaved: bool = False
    tied: bool = False
    attention_bias: bool = False


# Fields of a config.json that would change the arithmetic, and the only values this family has for them.
_NEUTRAL = {
    "hidden_act": ("silu", "swish"), "mlp_bias": (False,), "quantization_config": (), "sliding_window": (),
    "partial_rotary_factor": (1, 1.0), "num_local_experts": (0,), "num_experts": (0,), "attn_logit_softcapping": (),
    "final_logit_softcapping": (), "logits_scaling": (1, 1.0), "residual_multiplier": (1, 1.0),
    "embedding_multiplier": (1, 1.0), "rope_interleaved": (False,),
}  # fmt: skip


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    fields, tensors = checkpoint.config, checkpoint.tensors
    config = config_from_gguf(fields, tensors) if checkpoint.gguf else config_from_hf(fields)
    if config.layers > len(tensors):  # before anything is built per layer: the count is the file's word
        raise fields.fault("layers", f"{config.layers} layers but only {len(tensors)} tensors")
    names = tensor_names(config, checkpoint.gguf)
    factors = _rope_factors(checkpoint, config)
    weights = checkpoint.take(names, {role: tensor_shape(config, role) for role in names}, _ignored(config))
    return Decoder(
        config=config,
        weights=weights,
        parts={role: _PARTS[role.rpartition(".")[2]] for role in names},
        groups=lambda dtype_bytes: kv_groups(config, dtype_bytes),
        build=lambda prepared: build(config, prepared, rope(config, factors)),
    )


def config_from_hf(fields: Fields) -> LlamaConfig:
    """From the object in config.json.

    Raises:
        ModelFileError: a field is missing, mistyped, or asks for what this family does not do.
    """
    for name, accepted in _NEUTRAL.items():
        if fields.has(name) and fields.values[name] not in accepted:
            raise fields.fault(name, f"{fields.values[name]!r} is not supported for a Llama model")
    hidden_size, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    linear, scaling, theta = _hf_rope(fields)
    return _checked(
        fields,
        LlamaConfig(
            layers=fields.size("num_hidden_layers"),
            heads=heads,
            kv_heads=fields.size("num_key_value_heads", default=heads),
            head_dim=fields.size("head_dim", default=hidden_size // heads or 1),
            hidden_size=hidden_size,
            intermediate_size=fields.size("intermediate_size"),
            vocab_size=fields.size("vocab_size"),
            context_length=fields.size("max_position_embeddings", default=2048),
            norm_eps=fields.number("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_linear=linear,
            rope_llama3=scaling,
            tied=fields.flag("tie_word_embeddings", False),
            attention_bias=fields.flag("attention_bias", False),
        ),
    )


def _hf_rope(fields: Fields) -> tuple[float, Llama3Scaling | None, float]:
    """(linear factor, llama3 scaling, theta). Newer files say `rope_parameters`, older `rope_scaling`. Where a file has
    both, `rope_scaling` counts alone, as in transformers 5; what would be lost of theta that way is refused."""
    newer, older = fields.group("rope_parameters"), fields.group("rope_scaling")
    rope = older if older.values else newer
    for name, value in rope.values.items():
        if isinstance(value, dict):
            raise rope.fault(name, "a rope of its own per kind of layer is not supported for a Llama model")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    if newer.number("rope_theta", theta) != theta:
        raise newer.fault(
            "rope_theta", f"{newer.values['rope_theta']} contradicts {theta:g}, which rope_scaling implies"
        )
    kind = rope.text("rope_type", rope.text("type", "default"))
    if rope.has("partial_rotary_factor") and rope.number("partial_rotary_factor") != 1:
        raise rope.fault("partial_rotary_factor", "only 1 is supported for a Llama model")
    if kind == "default":
        return 1.0, None, theta
    if kind == "linear":
        return rope.number("factor"), None, theta
    if kind != "llama3":
        raise rope.fault("rope_type", f"{kind!r} is not supported; default, linear and llama3 are")
    scaling = Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_context=rope.size("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.fault("high_freq_factor", "must be above low_freq_factor")
    return 1.0, scaling, theta


# All a GGUF may say about a Llama; anything else in the `llama.` namespace might change the arithmetic.
_GGUF_KEYS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size", "tensor_data_layout",
    "attention.head_count", "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length",
    "attention.value_length", "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scale_linear", "expert_count",
    "expert_used_count",
}  # fmt: skip
ROPE_FACTORS = "rope_freqs.weight"  # per pair, what its frequency is divided by: llama.cpp's form of llama3 scaling


def config_from_gguf(fields: Fields, tensors: Mapping[str, Weight]) -> LlamaConfig:
    """From GGUF metadata (keys `llama.*`) and the tensors that are there.

    Raises:
        ModelFileError: as `config_from_hf`.
    """
    own = {key.removeprefix("llama."): value for key, value in fields.values.items() if key.startswith("llama.")}
    llama = Fields(own, f"{fields.where}: llama", fields.error)
    for key in own.keys() - _GGUF_KEYS:
        raise llama.fault(key, "this setting is not known for a Llama model")
    if own.get("expert_count", 0) != 0:
        raise llama.fault("expert_count", "mixtures of experts are not supported")
    scaling = llama.text("rope.scaling.type", "linear")  # what llama.cpp takes it for; the factor is 1 if not given
    if scaling not in ("none", "linear"):
        raise llama.fault("rope.scaling.type", f"{scaling!r} is not supported; none and linear are")
    hidden_size, heads = llama.size("embedding_length"), llama.size("attention.head_count")
    head_dim = llama.size("attention.key_length", default=hidden_size // heads or 1)
    for key in ("attention.value_length", "rope.dimension_count"):
        if llama.size(key, default=head_dim) != head_dim:
            raise llama.fault(key, f"{own[key]} differs from the head size {head_dim}; that is not supported")
    table = tensors.get("token_embd.weight")
    return _checked(
        fields,
        LlamaConfig(
            layers=llama.size("block_count"),
            heads=heads,
            kv_heads=llama.size("attention.head_count_kv", default=heads),
            head_dim=head_dim,
            hidden_size=hidden_size,
            intermediate_size=llama.size("feed_forward_length"),
            vocab_size=llama.size("vocab_size", default=table.shape[0] if table is not None else None),
            context_length=llama.size("context_length"),
            norm_eps=llama.number("attention.layer_norm_rms_epsilon"),
            rope_theta=llama.number("rope.freq_base", 10000.0),
            rope_linear=1.0
            if scaling == "none"
            else llama.number("rope.scaling.factor", llama.number("rope.scale_linear", 1.0)),
            rope_interleaved=True,
            tied="output.weight" not in tensors,
            attention_bias="blk.0.attn_q.bias" in tensors,
        ),
    )


def _checked(fields: Fields, config: LlamaConfig) -> LlamaConfig:
    if config.heads % config.kv_heads:
        raise fields.fault("attention heads", f"{config.heads} is not a multiple of {config.kv_heads} key/value heads")
    if config.head_dim % 2:
        raise fields.fault("head size", f"{config.head_dim} is odd; rotary positions need pairs")
    return config


# Role -> (name in a HF checkpoint, name in a GGUF).
_TOP = {
    "embed": ("model.embed_tokens.weight", "token_embd.weight"),
    "norm": ("model.norm.weight", "output_norm.weight"),
    "head": ("lm_head.weight", "output.weight"),
}
_LAYER = {
    "attention_norm": ("input_layernorm.weight", "attn_norm.weight"),
    "q": ("self_attn.q_proj.weight", "attn_q.weight"),
    "k": ("self_attn.k_proj.weight", "attn_k.weight"),
    "v": ("self_attn.v_proj.weight", "attn_v.weight"),
    "o": ("self_attn.o_proj.weight", "attn_output.weight"),
    "mlp_norm": ("post_attention_layernorm.weight", "ffn_norm.weight"),
    "gate": ("mlp.gate_proj.weight", "ffn_gate.weight"),
    "up": ("mlp.up_proj.weight", "ffn_up.weight"),
    "down": ("mlp.down_proj.weight", "ffn_down.weight"),
}
_BIASES = {
    "q_bias": ("self_attn.q_proj.bias", "attn_q.bias"),
    "k_bias": ("self_attn.k_proj.bias", "attn_k.bias"),
    "v_bias": ("self_attn.v_proj.bias", "attn_v.bias"),
    "o_bias": ("self_attn.o_proj.bias", "attn_output.bias"),
}

# Last part of a role -> the part it plays in a step.
_PARTS = {
    "embed": "embed", "head": "head", "norm": "norm", "attention_norm": "norm", "mlp_norm": "norm",
    "gate": "mlp", "up": "mlp", "down": "mlp",
} | dict.fromkeys(("q", "k", "v", "o", *_BIASES), "attention")  # fmt: skip


def tensor_names(config: LlamaConfig, gguf: bool) -> dict[str, str]:
    """Role ("embed", "3.q") -> tensor name in the file."""
    names = {role: pair[gguf] for role, pair in _TOP.items() if not (role == "head" and config.tied)}
    per_layer = _LAYER | (_BIASES if config.attention_bias else {})
    prefix = "blk" if gguf else "model.layers"
    for layer in range(config.layers):
        names |= {f"{layer}.{role}": f"{prefix}.{layer}.{pair[gguf]}" for role, pair in per_layer.items()}
    return names


def tensor_shape(config: LlamaConfig, role: str) -> tuple[int, ...]:
    """Shape of the tensor with this role, (out, in) of a matrix."""
    d, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "embed": (config.vocab_size, d), "norm": (d,), "head": (config.vocab_size, d),
        "attention_norm": (d,), "q": (queries, d), "k": (keys, d), "v": (keys, d), "o": (d, queries),
        "q_bias": (queries,), "k_bias": (keys,), "v_bias": (keys,), "o_bias": (d,),
        "mlp_norm": (d,), "gate": (inner, d), "up": (inner, d), "down": (d, inner),
    }[role.rpartition(".")[2]]  # fmt: skip


def kv_groups(config: LlamaConfig, dtype_bytes: float) -> tuple[KVGroup, ...]:
    """Every layer caches all positions. A query-key pair costs 2 FLOPs per number of a head, for its score and again
    for its value, in every query head (B2)."""
    width = config.head_dim
    flops = 4.0 * config.heads * width
    layers = tuple(range(config.layers))
    return (
        KVGroup(
            "full", layers, config.kv_heads, width, width,
            dtype_bytes=dtype_bytes, decode_flops=flops, prefill_flops=flops,
        ),
    )  # fmt: skip


def _ignored(config: LlamaConfig) -> set[str]:
    """Tensors that some files carry beside the weights: rope tables, which are computed (HF) or read apart (GGUF), and
    the output matrix of a model whose config says that the embedding is used instead."""
    tables = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config.layers)}
    return tables | {ROPE_FACTORS} | ({"lm_head.weight"} if config.tied else set())


def _rope_factors(checkpoint: Checkpoint, config: LlamaConfig) -> np.ndarray | None:
    """float32 [head_dim / 2], if a GGUF has them."""
    weight = checkpoint.tensors.get(ROPE_FACTORS)
    if weight is None:
        return None
    factors = weight.dequantise() if weight.shape == (config.head_dim // 2,) else np.zeros(1)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise checkpoint.config.fault(
            f"tensor {ROPE_FACTORS}", f"must hold {config.head_dim // 2} positive numbers, one per rotary pair"
        )
    return factors


def rope(config: LlamaConfig, factors: np.ndarray | None = None) -> Rope:
    """The rope of every layer. factors [head_dim / 2]: what each pair's frequency is divided by, if the file says."""
    inv_freq = inverse_frequencies(config.head_dim, config.rope_theta) / config.rope_linear
    if config.rope_llama3 is not None:
        inv_freq = llama3(inv_freq, config.rope_llama3)
    if factors is not None:
        inv_freq = inv_freq / factors
    return Rope(inv_freq.astype(np.float32), config.rope_interleaved)


def build(config: LlamaConfig, weights: Mapping[str, Prepared], rope: Rope) -> Forward:
    """The forward pass over prepared weights by role. A row-parallel rank's `residual` is added on one rank only, so
    that `all_reduce` sums it once."""
    scale = config.head_dim**-0.5
    head = weights["embed" if config.tied else "head"]

    def forward(ops: Ops) -> Tensor:
        x = ops.embed(weights["embed"])
        for layer in range(config.layers):
            w = {role: weights.get(f"{layer}.{role}") for role in (*_LAYER, *_BIASES)}
            h = ops.rms_norm(x, w["attention_norm"], config.norm_eps)
            q = ops.linear(h, w["q"], w["q_bias"])
            k = ops.linear(h, w["k"], w["k_bias"])
            v = ops.linear(h, w["v"], w["v_bias"])
            q = ops.rope_and_cache(q, k, v, layer, rope)
            attended = ops.attention(q, layer, scale)
            x = ops.all_reduce(ops.linear(attended, w["o"], w["o_bias"], residual=x))
            h = ops.rms_norm(x, w["mlp_norm"], config.norm_eps)
            x = ops.all_reduce(ops.gated_mlp(h, w["gate"], w["up"], w["down"], "silu", residual=x))
        x = ops.rms_norm(ops.logit_rows(x), weights["norm"], config.norm_eps)
        return ops.logits(x, head)

    return forward
