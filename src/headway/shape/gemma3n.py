"""Gemma 3n: Gemma 4's shared caches and embeddings per layer, with parallel residual streams (AltUp) and LAuReL."""

from __future__ import annotations

from collections.abc import Iterator

from headway.core.fields import Fields
from headway.shape.family import NORMS_4
from headway.shape.gemma4 import LayerShape, attention, sharing_groups
from headway.shape.model import KVGroup
from headway.shape.tensors import Dims, Tensor

FULL_EVERY = 5


def sparse(fields: Fields, size: Dims) -> list[bool]:
    return [False] * size.layers


def _shapes(fields: Fields, size: Dims) -> list[LayerShape]:
    words = fields.words("layer_types", size.layers)
    if words is None:
        words = ["" if (layer + 1) % FULL_EVERY else "full_attention" for layer in range(size.layers)]
    first_shared = size.layers - (fields.maybe("num_kv_shared_layers") or 0)
    return [
        LayerShape("full" if word == "full_attention" else "window", size.head, size.kv_heads, False, i < first_shared)
        for i, word in enumerate(words)
    ]


def tensors(fields: Fields, size: Dims) -> Iterator[Tensor]:
    """Every tensor, in the names of the published checkpoints."""
    d, streams = size.d, fields.size("altup_num_inputs")
    per_layer, rank = fields.size("hidden_size_per_layer_input"), fields.size("laurel_rank")
    table = fields.size("vocab_size_per_layer_input", default=size.vocab)
    yield Tensor("model.embed_tokens.weight", (size.vocab, d), "embed")
    yield Tensor("model.norm.weight", (d,), "norm")
    yield Tensor("model.embed_tokens_per_layer.weight", (table, size.layers * per_layer), "gathered")
    yield Tensor("model.per_layer_model_projection.weight", (size.layers * per_layer, d), "mlp")
    yield Tensor("model.per_layer_projection_norm.weight", (per_layer,), "norm")
    for stream in range(streams - 1):
        yield Tensor(f"model.altup_projections.{stream}.weight", (d, d), "mlp")
        yield Tensor(f"model.altup_unembed_projections.{stream}.weight", (d, d), "mlp")
    widths = fields.values.get("intermediate_sizes") or [size.ffn] * size.layers
    if len(widths) != size.layers:
        raise fields.fault("intermediate_size", f"not a list of {size.layers} numbers")
    for layer, shape in enumerate(_shapes(fields, size)):
        at, ffn = f"model.layers.{layer}.", widths[layer]
        for name in (*dict(NORMS_4).values(), "post_per_layer_input_norm", "laurel.post_laurel_norm",
                     "altup.router_norm"):  # fmt: skip
            yield Tensor(f"{at}{name}.weight", (d,), "norm")
        yield Tensor(at + "altup.correct_output_scale", (d,), "norm")
        yield Tensor(at + "altup.correction_coefs.weight", (streams, streams), "mlp")
        yield Tensor(at + "altup.prediction_coefs.weight", (streams * streams, streams), "mlp")
        yield Tensor(at + "altup.modality_router.weight", (streams, d), "mlp")
        yield Tensor(at + "laurel.linear_left.weight", (rank, d), "mlp")
        yield Tensor(at + "laurel.linear_right.weight", (d, rank), "mlp")
        yield Tensor(at + "per_layer_input_gate.weight", (per_layer, d), "mlp")
        yield Tensor(at + "per_layer_projection.weight", (d, per_layer), "mlp")
        yield from attention(at + "self_attn.", shape, size)
        for name in ("gate_proj", "up_proj"):
            yield Tensor(f"{at}mlp.{name}.weight", (ffn, d), "mlp")
        yield Tensor(at + "mlp.down_proj.weight", (d, ffn), "mlp")


def groups(fields: Fields, size: Dims, kv_bytes: float) -> tuple[KVGroup, ...]:
    return sharing_groups(fields, size, _shapes(fields, size), kv_bytes)
