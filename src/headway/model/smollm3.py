"""SmolLM 3: a Llama in which every fourth layer knows no positions (Bakouch et al. 2025)."""

from __future__ import annotations

from dataclasses import replace

from headway.core.fields import Fields
from headway.model import llama
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions, decoder_config, stated
from headway.model.family import Decoder, decoder_of

INTERVAL = 4  # the last layer of every so many, where a file does not list them
CONVENTIONS = Conventions(
    understood=llama.CONVENTIONS.understood | {"sliding_window"},
    gguf_interleaved=True,
)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    config, fields = decoder_config(checkpoint, CONVENTIONS), stated(checkpoint, CONVENTIONS)
    unrotated = frozenset(_unrotated(fields, config.layers))
    return decoder_of(checkpoint, fields, replace(config, unrotated=unrotated), llama.build)


def _unrotated(fields: Fields, layers: int) -> list[int]:
    rotated = fields.values.get("no_rope_layers")  # which is 1 for a layer that has a rope
    if rotated is None:
        interval = fields.size("no_rope_layer_interval", default=INTERVAL)
        return [layer for layer in range(layers) if (layer + 1) % interval == 0]
    if not isinstance(rotated, list) or len(rotated) != layers or not all(flag in (0, 1) for flag in rotated):
        raise fields.fault("no_rope_layers", f"{rotated} is not a list of {layers} times 0 or 1")
    return [layer for layer, flag in enumerate(rotated) if not flag]
