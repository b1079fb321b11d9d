"""Nemotron-H: each layer is one thing, a Mamba-2 mixer, attention, an MLP or a mixture of experts without gates."""

from __future__ import annotations

from collections.abc import Iterator

from headway.core.fields import Fields
from headway.shape.model import STATE_BYTES, KVGroup
from headway.shape.tensors import Dims, Tensor

_LETTERS = {"M": "state", "*": "full", "-": "mlp", "E": "moe"}
_WORDS = {
    "mamba": "state", "linear_attention": "state", "attention": "full", "full_attention": "full", "mlp": "mlp",
    "moe": "moe",
}  # fmt: skip


def _blocks(fields: Fields, size: Dims) -> list[str]:
    """ "state", "full", "mlp" or "moe" of each layer."""
    listed = fields.words("layers_block_type", size.layers)
    name, known, blocks = "layers_block_type", _WORDS, listed or []
    if listed is None:
        name, known, blocks = "hybrid_override_pattern", _LETTERS, list(fields.text("hybrid_override_pattern"))
    if unknown := sorted(set(blocks) - known.keys()):
        raise fields.fault(name, f"{unknown[0]!r}; accepted: {', '.join(known)}")
    return [known[block] for block in blocks]


def sparse(fields: Fields, size: Dims) -> list[bool]:
    return [block == "moe" for block in _blocks(fields, size)]


def _mamba(fields: Fields) -> tuple[int, int, int, int, int]:
    """(heads, inner width, groups of B and C, numbers of state per channel, kernel of the convolution)."""
    heads = fields.size("mamba_num_heads")
    inner = heads * fields.size("mamba_head_dim")
    return heads, inner, fields.size("n_groups"), fields.size("ssm_state_size"), fields.size("conv_kernel")


def tensors(fields: Fields, size: Dims) -> Iterator[Tensor]:
    """Every tensor, in the names of the published checkpoints."""
    d = size.d
    yield Tensor("backbone.embeddings.weight", (size.vocab, d), "embed")
    yield Tensor("backbone.norm_f.weight", (d,), "norm")
    if not size.tied:
        yield Tensor("lm_head.weight", (size.vocab, d), "head")
    makers = {"state": _mixer, "full": _attention, "moe": _experts}
    for layer, block in enumerate(_blocks(fields, size)):
        at = f"backbone.layers.{layer}."
        yield Tensor(at + "norm.weight", (d,), "norm")
        if block == "mlp":
            yield from _mlp(at + "mixer.", d, size.ffn, "mlp", fields.flag("mlp_bias"))
        else:
            yield from makers[block](fields, size, at + "mixer.")


def _mixer(fields: Fields, size: Dims, at: str) -> Iterator[Tensor]:
    heads, inner, groups, state, kernel = _mamba(fields)
    channels, bias = inner + 2 * groups * state, fields.flag("use_bias")
    for name, rows, columns in (("in_proj", inner + channels + heads, size.d), ("out_proj", size.d, inner)):
        yield Tensor(f"{at}{name}.weight", (rows, columns), "attention")
        if bias:
            yield Tensor(f"{at}{name}.bias", (rows,), "attention")
    yield Tensor(at + "conv1d.weight", (channels, 1, kernel), "attention")
    if fields.flag("use_conv_bias", True):
        yield Tensor(at + "conv1d.bias", (channels,), "attention")
    for name in ("A_log", "D", "dt_bias"):
        yield Tensor(at + name, (heads,), "norm")
    yield Tensor(at + "norm.weight", (inner,), "norm")


def _attention(fields: Fields, size: Dims, at: str) -> Iterator[Tensor]:
    q, kv = size.heads * size.head, size.kv_heads * size.head
    for name, shape in (("q", (q, size.d)), ("k", (kv, size.d)), ("v", (kv, size.d)), ("o", (size.d, q))):
        yield Tensor(f"{at}{name}_proj.weight", shape, "attention")


def _mlp(at: str, d: int, ffn: int, part: str, bias: bool, copies: int = 1) -> Iterator[Tensor]:
    for name, rows, columns in (("up_proj", ffn, d), ("down_proj", d, ffn)):
        yield Tensor(f"{at}{name}.weight", (rows, columns), part, copies)
        if bias:
            yield Tensor(f"{at}{name}.bias", (rows,), part, copies)


def _experts(fields: Fields, size: Dims, at: str) -> Iterator[Tensor]:
    """Routed experts may work in a narrower space, `moe_latent_size` wide."""
    experts, d, bias = fields.size("n_routed_experts"), size.d, fields.flag("mlp_bias")
    latent = fields.maybe("moe_latent_size")
    yield Tensor(at + "gate.weight", (experts, d), "router")
    yield Tensor(at + "gate.e_score_correction_bias", (experts,), "router")
    yield from _mlp(at + "experts.{}.", latent or d, fields.size("moe_intermediate_size"), "experts", False, experts)
    yield from _mlp(at + "shared_experts.", d, fields.size("moe_shared_expert_intermediate_size"), "shared", bias)
    for name, shape in (("fc1_latent_proj", (latent, d)), ("fc2_latent_proj", (d, latent))) if latent else ():
        yield Tensor(f"{at}{name}.weight", shape, "shared")
        if bias:
            yield Tensor(f"{at}{name}.bias", shape[:1], "shared")


def groups(fields: Fields, size: Dims, kv_bytes: float) -> tuple[KVGroup, ...]:
    """A state per Mamba-2 layer: every channel has `ssm_state_size` numbers (decayed, added to and read for every
    token: about 6 FLOPs each), beside the convolution's last inputs. Split by group."""
    found = []
    for kind in dict.fromkeys(_blocks(fields, size)):
        layers = tuple(layer for layer, block in enumerate(_blocks(fields, size)) if block == kind)
        if kind == "state":
            _, inner, parts, state, kernel = _mamba(fields)
            flops = 6.0 * inner * state
            found.append(KVGroup(
                "state", layers, parts, inner // parts * state, (kernel - 1) * (inner // parts + 2 * state),
                dtype_bytes=STATE_BYTES, decode_flops=flops, prefill_flops=flops,
            ))  # fmt: skip
        elif kind == "full":
            flops = 4.0 * size.heads * size.head
            found.append(KVGroup(
                "full", layers, size.kv_heads, size.head, size.head, dtype_bytes=kv_bytes, decode_flops=flops,
                prefill_flops=flops,
            ))  # fmt: skip
    return tuple(found)
