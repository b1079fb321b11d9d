"""Mixtures of experts: what configs say of them, how files keep their matrices, and the block that uses them.

A layer's experts become three stacks of matrices, whatever the file has: a tensor per expert and matrix (Hugging Face),
one for all experts with gates and what they gate in one (transformers 5, Granite), or one per matrix (GGUF).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headway.core.errors import ModelFileError, shown
from headway.core.fields import Fields
from headway.model.blocks import Weights, gated_mlp
from headway.model.checkpoint import Checkpoint
from headway.model.config import DecoderConfig
from headway.ops.protocol import Ops, Tensor
from headway.ops.routing import ClampedSwiGLU, Routing
from headway.ops.weight import Weight, stack
from headway.shape import config as shape_config
from headway.shape.families import FAMILIES

MAX_EXPERTS = 1 << 14  # per layer


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(DecoderConfig):
    """A decoder some of whose layers have experts.

    Attributes:
        routing: how experts are chosen.
        expert_activation: of the routed experts.
    """

    routing: Routing
    expert_activation: str | ClampedSwiGLU


# Fields of config.json that say something of experts: a mixture understands them.
UNDERSTOOD = frozenset({"num_experts", "num_local_experts"})
# Key in a GGUF -> the field of config.json that says the same.
GGUF_KEYS = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}  # fmt: skip

DENSE = ("gate", "up", "down")  # roles of a dense layer's MLP


def _sparse_layers(checkpoint: Checkpoint, fields: Fields, layers: int) -> frozenset[int]:
    """Layers with experts: those whose tensors a GGUF has, or as the config says."""
    if checkpoint.gguf:
        return frozenset(layer for layer in range(layers) if f"blk.{layer}.ffn_gate_inp.weight" in checkpoint.tensors)
    sparse = shape_config.sparse_layers(FAMILIES[checkpoint.architecture], fields, layers)
    return frozenset(layer for layer in range(layers) if sparse[layer])


def active_experts(fields: Fields) -> int:
    """How many experts a token chooses."""
    return fields.size("num_experts_per_tok", most=MAX_EXPERTS)


def mixture(checkpoint: Checkpoint, config: DecoderConfig, fields: Fields, routing: Routing) -> MixtureConfig:
    """The config of a mixture.

    Args:
        fields: of the checkpoint, under config.json's names.
        routing: how experts are chosen.

    Raises:
        ModelFileError: a field is missing, or asks for more experts than there are.
    """
    count = fields.size("num_experts", "num_local_experts", "n_routed_experts", most=MAX_EXPERTS)
    active, groups, kept = routing.active, routing.groups, routing.kept_groups
    if count % groups or kept > groups:
        raise fields.fault("n_group", f"{count} experts in {groups} groups, {kept} chosen: impossible")
    if active > kept * (count // groups):
        raise fields.fault("num_experts_per_tok", f"{active} is more than the experts there are to choose from")
    return MixtureConfig(
        **vars(replace(config, sparse=_sparse_layers(checkpoint, fields, config.layers))),
        routing=routing,
        expert_activation=config.activation,
    )


def feed_forward(ops: Ops, x: Tensor, w: Weights, layer: int, config: MixtureConfig) -> Tensor:
    """x + the layer's MLP or experts, shared ones included, of the normed x."""
    if layer not in config.sparse:
        return gated_mlp(ops, x, w, config)
    h = ops.rms_norm(x, w["mlp_norm"], config.norm_eps)
    if "shared_switch" in w:
        x = ops.sigmoid_gate(_shared(ops, h, w, config), ops.linear(h, w["shared_switch"]), residual=x)
    elif "shared_gate" in w:
        x = _shared(ops, h, w, config, residual=x)
    mixed = ops.experts(
        h,
        w["router"],
        w["experts_gate"],
        w["experts_up"],
        w["experts_down"],
        config.routing,
        config.expert_activation,
        w.get("router_bias"),
        w.get("correction_bias"),
        w.get("experts_gate_bias"),
        w.get("experts_up_bias"),
        w.get("experts_down_bias"),
        residual=x,
    )
    return ops.all_reduce(mixed)


def _shared(ops: Ops, h: Tensor, w: Weights, config: MixtureConfig, residual: Tensor | None = None) -> Tensor:
    gate, up, down = (w[f"shared_{of}"] for of in DENSE)
    gate_bias, up_bias, down_bias = (w.get(f"shared_{of}_bias") for of in DENSE)
    return ops.gated_mlp(h, gate, up, down, config.activation, residual, gate_bias, up_bias, down_bias)


# ---- how files keep experts

_BLOCK = r"(?P<layer>.*\.)(?:mlp|block_sparse_moe)\."
_NAME = r"(?P<name>gate_proj|up_proj|down_proj|w[123])"
_PER_EXPERT = re.compile(_BLOCK + r"experts\.(?P<number>\d+)\." + _NAME + r"\.weight")
_FUSED = re.compile(_BLOCK + r"(?:experts\.gate_up_proj|input_linear)(?:\.weight)?")
_DOWN = re.compile(_BLOCK + r"(?:experts\.down_proj|output_linear)(?:\.weight)?")
_ROUTER = re.compile(r"(?P<layer>.*\.)block_sparse_moe\.(?:gate|router\.layer)\.weight")
_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # Mixtral's


def stacked(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint with the matrices of a layer's experts as stacks, under one set of names.

    Raises:
        ModelFileError: an expert is missing, or is not like the others.
    """
    if checkpoint.gguf:
        return checkpoint  # they are stacks there
    tensors: dict[str, Weight] = {}
    experts: dict[str, dict[int, Weight]] = {}
    for name, weight in checkpoint.tensors.items():
        if (found := _PER_EXPERT.fullmatch(name)) is not None:
            role = _NAMES.get(found["name"], found["name"])
            experts.setdefault(_stack(found["layer"], role), {})[int(found["number"])] = weight
        elif (found := _ROUTER.fullmatch(name)) is not None:
            tensors[f"{found['layer']}mlp.gate.weight"] = weight
        elif len(weight.shape) == 3 and (found := _FUSED.fullmatch(name)) is not None:
            half = weight.shape[1] // 2
            for role, rows in (("gate_proj", slice(half)), ("up_proj", slice(half, None))):
                tensors[_stack(found["layer"], role)] = weight.within(rows)
        elif len(weight.shape) == 3 and (found := _DOWN.fullmatch(name)) is not None:
            tensors[_stack(found["layer"], "down_proj")] = weight
        else:
            tensors[name] = weight
    for name, matrices in experts.items():
        tensors[name] = stack(name, _in_order(checkpoint, name, matrices))
    return replace(checkpoint, tensors=tensors)


def _stack(layer: str, role: str) -> str:
    return f"{layer}mlp.experts.{{}}.{role}.weight"


def _in_order(checkpoint: Checkpoint, name: str, matrices: Mapping[int, Weight]) -> tuple[Weight, ...]:
    for number in range(len(matrices)):
        if number not in matrices:
            raise ModelFileError(f"{checkpoint.path}: {shown(name)}: expert {number} of {max(matrices) + 1} is missing")
    ordered = tuple(matrices[number] for number in range(len(matrices)))
    check_alike(checkpoint, ordered)
    return ordered


def check_alike(checkpoint: Checkpoint, matrices: Sequence[Weight]) -> None:
    """Raises:
    ModelFileError: a matrix differs from the first in shape or format.
    """
    first = matrices[0]
    for other in matrices:
        if (other.shape, other.format) != (first.shape, first.format):
            raise ModelFileError(
                f"{checkpoint.path}: tensor {other.name}: {other.format} of shape {other.shape}, where {first.name} is "
                f"{first.format} of shape {first.shape}; experts of a layer must be alike"
            )
