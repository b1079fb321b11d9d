"""The tensors that a family takes from a file: its inventory, under the names of either kind of file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headway.core.fields import Fields
from headway.model.config import DecoderConfig
from headway.ops.weight import Weight
from headway.shape.families import Family
from headway.shape.tensors import Tensor, inventory, name_in_gguf

Cut = Callable[[Weight, Any], Mapping[str, Weight]]  # (a tensor, the config) -> the weights that are in it, by role


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a file must have.

    Attributes:
        hf, gguf: its name in a Hugging Face folder and in a GGUF.
        part: which it plays in a step, a field of `ByPart`.
        shape: (out, in) of a matrix; in front of these, how many matrices a stack has.
        cut: what forward passes know it as, where that is not the tensor itself under its role.
    """

    hf: str
    gguf: str
    part: str
    shape: tuple[int, ...]
    cut: Cut | None = None

    def name(self, gguf: bool) -> str:
        return self.gguf if gguf else self.hf


def cut_qkv(fused: Weight, config: DecoderConfig) -> Mapping[str, Weight]:
    """Rows of queries, then of keys, then of values."""
    keys, values = config.q_width, config.q_width + config.kv_width
    return {"q": fused.rows(0, keys), "k": fused.rows(keys, values), "v": fused.rows(values, fused.shape[0])}


def cut_heads(fused: Weight, config: DecoderConfig) -> Mapping[str, Weight]:
    """Rows of the queries, the key and the value of the first key/value head, then of the next head's."""
    queries = config.heads // config.kv_heads
    places = {"q": (0, queries), "k": (queries, 1), "v": (queries + 1, 1)}
    return {role: fused.dealt(first, queries + 2, config.head_dim, many) for role, (first, many) in places.items()}


def cut_gate_up(fused: Weight, config: DecoderConfig) -> Mapping[str, Weight]:
    """Rows of gates, then of what they gate."""
    gates = config.intermediate_size
    return {"gate": fused.rows(0, gates), "up": fused.rows(gates, fused.shape[0])}


CUTS: Mapping[str, Cut] = {"qkv": cut_qkv, "gate_up": cut_gate_up}


def tensors_of(
    family: Family, fields: Fields, config: DecoderConfig, cuts: Mapping[str, Cut] = CUTS
) -> dict[str, TensorSpec]:
    """Role -> tensor of a whole model; the role of layer 3's "q" is "3.q".

    Args:
        fields: of the checkpoint, under config.json's names.
        cuts: role within a layer -> how such a tensor is cut, and its bias.
    """
    kinds = ["latent" if fields.has("kv_lora_rank") else "full"] * config.layers
    sparse = [layer in config.sparse for layer in range(config.layers)]
    return {
        tensor.role: TensorSpec(
            tensor.name,
            name_in_gguf(tensor.role, family),
            tensor.part,
            tensor.shape if tensor.copies == 1 else (tensor.copies, *tensor.shape),
            _cut(family, tensor, cuts),
        )
        for tensor in inventory(family, fields, kinds, sparse)
    }


def _cut(family: Family, tensor: Tensor, cuts: Mapping[str, Cut]) -> Cut | None:
    own = tensor.role.rpartition(".")[2]
    stem = own.removesuffix("_bias")
    inner, vector = cuts.get(stem), tensor.part == "norm" or own != stem
    if inner is None and vector and len(tensor.shape) + (tensor.copies > 1) > 1:
        return lambda weight, config: {own: replace(weight, shape=(math.prod(weight.shape),))}
    if family.transposed and not vector and "." in tensor.role:
        return lambda weight, config: _pieces(own, weight.transposed(), config, inner)
    return inner and (lambda weight, config: _pieces(own, weight, config, inner))


def _pieces(role: str, weight: Weight, config: DecoderConfig, cut: Cut | None) -> Mapping[str, Weight]:
    pieces = {role.removesuffix("_bias"): weight} if cut is None else cut(weight, config)
    return {f"{name}_bias": bias for name, bias in pieces.items()} if role.endswith("_bias") else pieces
