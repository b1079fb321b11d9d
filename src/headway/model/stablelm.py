"""StableLM (3B, 2): a Llama with layer norms that rotates a part of each head (Bellagente et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from headway.model import llama, parallel
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions, decoder_config, stated
from headway.model.family import Decoder, decoder_of
from headway.ops.weight import Weight

CONVENTIONS = Conventions(
    understood=frozenset({"partial_rotary_factor"}),
    gguf={"use_parallel_residual": "use_parallel_residual"},
    layer_norms=True,
)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    config, fields = decoder_config(checkpoint, CONVENTIONS), stated(checkpoint, CONVENTIONS)
    if fields.flag("use_qk_norm", False):
        checkpoint = replace(checkpoint, tensors=joined(checkpoint.tensors, config.layers))
    together = fields.flag("use_parallel_residual", False)
    return decoder_of(checkpoint, fields, config, parallel.build if together else llama.build)


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
                whole, shape = f"{name}norms.{{}}.weight", (len(order), len(numbers) // len(order))
                rest[whole] = Weight(whole, shape, "f32", numbers.view(np.uint8))
    return rest
