"""`ModelShape` from a GGUF header: metadata and the list of tensors, as plain dicts (the file is read elsewhere).

Parameters and bytes are summed over the tensors themselves, each in the type it is stored in, so a "Q4_K_M" file is
priced as the mixture of types it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from headway.core.errors import BadInput
from headway.core.fields import MAX_LAYERS, MAX_SIZE
from headway.shape.families import family_in_gguf
from headway.shape.formats import FORMATS
from headway.shape.model import ByPart, KVGroup, ModelShape, MoE

NORMS = ("_norm", "output_norm", "rope_freqs", "sinks")


def shape_from_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, tuple[Sequence[int], str]], name: str = ""
) -> ModelShape:
    """The shape of the model in a GGUF file.

    Args:
        metadata: header values by key.
        tensors: name -> (shape, format such as "q4_0"), any order of dimensions.

    Raises:
        BadInput: not a decoder, a key is missing, or its layers keep recurrent states (not readable from the header).
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise BadInput("general.architecture", "missing; a GGUF language model names its architecture")

    def number(key: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        value = metadata.get(f"{architecture}.{key}", default)
        if isinstance(value, list) and value:
            value = max(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise BadInput(f"{architecture}.{key}", f"{value!r}; accepted: a whole number from 1 to {most}")
        return value

    if any(key.startswith(f"{architecture}.ssm.") for key in metadata):
        raise BadInput("general.architecture", f"{architecture!r} has recurrent layers; plan it from its config.json")
    layers = number("block_count", most=MAX_LAYERS)
    d, heads = number("embedding_length"), number("attention.head_count")
    head = number("attention.key_length", max(1, d // heads))
    params, stored = _sums(tensors)
    tied = params.head == 0
    experts = metadata.get(f"{architecture}.expert_count") or 0
    latent = f"{architecture}.attention.kv_lora_rank" in metadata
    groups = _groups(architecture, metadata, number, layers, heads, head)
    return ModelShape(
        name=name or str(metadata.get("general.name") or architecture), family=architecture, layers=layers, d_model=d,
        vocab=int(params.embed) // d, heads=heads,
        kv_heads=1 if latent else number("attention.head_count_kv", heads),
        head_width=head, params=params, stored=stored, groups=groups, tied=tied,
        moe=_moe(params, tensors, experts, number) if experts else None,
        context=number("context_length", 1), weight_format=_commonest(tensors),
        head_format=tensors.get("output.weight", tensors["token_embd.weight"])[1],
    )  # fmt: skip


def part_of(name: str) -> str:
    """What a tensor does, by its GGUF name."""
    if name.startswith("token_embd."):
        return "embed"
    if name.startswith("output."):
        return "head"
    if name.startswith("position_embd."):
        return "gathered"
    if any(part in name for part in NORMS):
        return "norm"
    if "_shexp" in name:
        return "shared"
    if "_exps" in name:
        return "experts"
    if "ffn_gate_inp" in name or "exp_probs" in name:
        return "router"
    return "mlp" if ".ffn_" in name else "attention"


def _sums(tensors: Mapping[str, tuple[Sequence[int], str]]) -> tuple[ByPart, ByPart]:
    params: dict[str, float] = {}
    stored: dict[str, float] = {}
    for name, (shape, kind) in tensors.items():
        if kind not in FORMATS:
            raise BadInput(f"tensor {name}", f"stored as {kind}; accepted: {', '.join(sorted(FORMATS))}")
        part, numel = part_of(name), prod(shape)
        params[part] = params.get(part, 0) + numel
        stored[part] = stored.get(part, 0) + numel * FORMATS[kind].width
    if "embed" not in params:
        raise BadInput("token_embd.weight", "missing; a GGUF language model has it")
    return ByPart(**params), ByPart(**stored)


def _commonest(tensors: Mapping[str, tuple[Sequence[int], str]]) -> str:
    numbers: dict[str, int] = {}
    for shape, kind in tensors.values():
        numbers[kind] = numbers.get(kind, 0) + prod(shape)
    return max(numbers, key=lambda kind: numbers[kind])


def _groups(
    architecture: str, metadata: Mapping[str, Any], number: Any, layers: int, heads: int, head: int
) -> tuple[KVGroup, ...]:
    value = number("attention.value_length", head)
    every = tuple(range(layers))
    if f"{architecture}.attention.kv_lora_rank" in metadata:
        rank, rope = number("attention.kv_lora_rank"), number("rope.dimension_count")
        wide, narrow = number("attention.key_length_mla", head), number("attention.value_length_mla", value)
        return (KVGroup(
            "latent", every, 1, rope, rank, decode_flops=2.0 * heads * (2 * rank + rope),
            prefill_flops=2.0 * heads * (wide + narrow),
        ),)  # fmt: skip
    flops = 2.0 * heads * (head + value)
    kv_heads = number("attention.head_count_kv", heads)
    window = metadata.get(f"{architecture}.attention.sliding_window")
    if not window:
        return (KVGroup("full", every, kv_heads, head, value, decode_flops=flops, prefill_flops=flops),)
    windowed = _windowed(architecture, metadata, number, layers)
    full = tuple(layer for layer in every if layer not in windowed)
    groups = [
        KVGroup("window", windowed, kv_heads, head, value, window=number("attention.sliding_window"),
                decode_flops=flops, prefill_flops=flops),
        KVGroup("full", full, kv_heads, head, value, decode_flops=flops, prefill_flops=flops),
    ]  # fmt: skip
    return tuple(group for group in groups if group.layers)


def _windowed(architecture: str, metadata: Mapping[str, Any], number: Any, layers: int) -> tuple[int, ...]:
    """Layers with a window; the pattern is a period or a flag per layer."""
    key = "attention.sliding_window_pattern"
    pattern = metadata.get(f"{architecture}.{key}", family_in_gguf(architecture).window_every)
    if not isinstance(pattern, list):
        period = number(key, pattern) if pattern else 0
        pattern = [not period or (layer + 1) % period != 0 for layer in range(layers)]
    if len(pattern) != layers or not all(isinstance(flag, bool) for flag in pattern):
        raise BadInput(f"{architecture}.{key}", f"must be a period, or true or false for each of {layers} layers")
    return tuple(layer for layer, windowed in enumerate(pattern) if windowed)


def _moe(params: ByPart, tensors: Mapping[str, tuple[Sequence[int], str]], experts: int, number: Any) -> MoE:
    sparse = sum(1 for name in tensors if name.endswith("ffn_down_exps.weight"))
    if not sparse:
        raise BadInput("expert_count", f"{experts} experts but no ffn_down_exps tensor")
    return MoE(sparse, experts, number("expert_used_count"), int(params.experts) // (sparse * experts))
