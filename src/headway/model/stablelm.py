"""StableLM (3B, 2): a Llama with layer norms that rotates a part of each head (Bellagente et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from headway.model import llama, parallel
from headway.model.checkpoint import Checkpoint
from headway.model.config import Dialect, decoder_config, has_attention_biases, stated
from headway.model.family import Decoder, decoder_of
from headway.model.tensors import BESIDE_LAYERS, FULL_QK_NORMS, LAST_NORM_BIAS, LAYER, NORM_BIASES, QKV_BIASES, without
from headway.ops.weight import Weight

DIALECT = Dialect(
    understood=frozenset({"partial_rotary_factor"}),
    gguf={"use_parallel_residual": "use_parallel_residual"},
    layer_norms=True,
)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    config, fields = decoder_config(checkpoint, DIALECT), stated(checkpoint, DIALECT)
    layer = LAYER | NORM_BIASES | (QKV_BIASES if has_attention_biases(checkpoint) else {})
    build = llama.build
    if fields.flag("use_qk_norm", False):
        layer |= FULL_QK_NORMS
        checkpoint = replace(checkpoint, tensors=joined(checkpoint.tensors, config.layers))
    if fields.flag("use_parallel_residual", False):
        layer, build = without(layer, "mlp_norm", "mlp_norm_bias"), parallel.build
    return decoder_of(checkpoint, config, layer, build, beside=BESIDE_LAYERS | LAST_NORM_BIAS)


def joined(tensors: Mapping[str, Weight], layers: int) -> dict[str, Weight]:
    """The tensors, with the norms of a layer's single heads as one."""
    rest = {name: weight for name, weight in tensors.items() if "_layernorm.norms." not in name}
    for layer in range(layers):
        for role in "qk":
            name = f"model.layers.{layer}.self_attn.{role}_layernorm."
            heads = [weight for norm, weight in tensors.items() if norm.startswith(f"{name}norms.")]
            order = sorted(heads, key=lambda head: int("0" + head.name.split(".")[-2]))
            if order:
                numbers = np.concatenate([head.dequantise() for head in order])
                data = numbers.view(np.uint8)
                rest[f"{name}weight"] = Weight(f"{name}weight", numbers.shape, "f32", data)
    return rest
