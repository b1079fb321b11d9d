"""What one family of models adds to the common decoder: the columns of the table in `families.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# (What forward passes know a norm as, its name.)
NORMS_2 = (("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm"))
NORMS_BEHIND = (
    ("attention_post_norm", "post_attention_layernorm"), ("mlp_post_norm", "post_feedforward_layernorm"),
)  # fmt: skip
NORMS_4 = (NORMS_2[0], *NORMS_BEHIND, ("mlp_norm", "pre_feedforward_layernorm"))


@dataclass(frozen=True)
class Family:
    """Traits of a family.

    Attributes:
        qkv_bias, o_bias: True, False, or None = as the config's `attention_bias` says.
        qk_norm: "" none, "head" one per head width, "full" over all heads, "each" = one of each head, "apart" = the
            same, in tensors of their own; none either where `use_qk_norm` is false.
        norms: the layer's norms of width d. norm_bias: they have biases, as has the last.
        plain_mlp: no gates. positions: a table of learned ones. head_bias: of the output matrix.
        transposed: matrices of layers are kept (in, out).
        fused_qkv, fused_gate_up: stored as one matrix.
        experts: how routed experts are stored: "" none, "mlp" (mlp.experts.N.gate_proj), "block" (Mixtral's w1..w3),
            "fused" (one tensor for all: Granite), "stacked" (the same, (in, out) and with biases: gpt-oss).
            expert_bias: their matrices and the router's have biases.
        own: the file beside this one that lists its tensors and caches (`own.py`), for what is no common decoder.
        correction: the router carries a correction per expert.
        shared: how shared experts are stored: "", "sum" (n_shared_experts wide), "gated" (one, with its own gate).
        apart: latent attention has matrices of every head's keys and values instead of one for all (GGUF).
        sinks: one learned sink per head. gated_attention: the query projection also makes an output gate.
        split_linear: linear attention keeps its projections as four matrices instead of two.
        window_every: where config.json does not list kinds of layers, one is full if (index + 1) % window_every == 0,
            else has a window (`linear` attention for the hybrid families).
        defaults: what the config class in transformers takes for fields that config.json leaves out.
        shared_norm: with `use_parallel_residual` attention and MLP share the first norm.
        inner: intermediate_size, in widths of the model, where config.json leaves it out.
        unread: fields that the config class has no use for.
        fields: (a field as Llama's config.json calls it, its name in this family's).
        implied: what follows from a config's fields, as further ones under Llama's names.
        names: (a part of a tensor's name as a Llama's folder has it, what stands there instead).
        in_gguf: what forward passes know a tensor as -> its name in GGUF files, where that is not as in the others.
    """

    qkv_bias: bool | None = None
    o_bias: bool | None = None
    qk_norm: str = ""
    norms: tuple[tuple[str, str], ...] = NORMS_2
    fused_qkv: bool = False
    fused_gate_up: bool = False
    experts: str = ""
    own: str = ""
    expert_bias: bool = False
    correction: bool = False
    shared: str = ""
    apart: bool = False
    sinks: bool = False
    gated_attention: bool = False
    split_linear: bool = False
    window_every: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    norm_bias: bool = False
    plain_mlp: bool = False
    positions: bool = False
    head_bias: bool = False
    transposed: bool = False
    shared_norm: bool = False
    inner: int = 0
    unread: tuple[str, ...] = ()
    fields: tuple[tuple[str, str], ...] = ()
    implied: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: {}
    names: tuple[tuple[str, str], ...] = ()
    in_gguf: Mapping[str, str] = field(default_factory=dict)

    def named(self, name: str) -> str:
        """A tensor of a Llama's folder, as this family's call it."""
        for ours, theirs in self.names:
            name = name.replace(ours, theirs)
        return name

    def complete(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """A config's fields with those that it leaves out, under Llama's names too; null stays null."""
        whole = dict(self.defaults) | dict(values)
        if values.get("rope_scaling"):  # the older form of rope_parameters; a default of these does not count beside it
            whole["rope_parameters"] = values.get("rope_parameters")
        whole |= {ours: whole[theirs] for ours, theirs in self.fields if theirs in whole}
        whole |= dict.fromkeys(self.unread) | dict(self.implied(whole))
        if self.inner and whole.get("intermediate_size") is None and isinstance(whole.get("hidden_size"), int):
            whole["intermediate_size"] = self.inner * whole["hidden_size"]
        return whole
