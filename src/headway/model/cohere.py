"""Command R (and R7B, cohere2): attention and MLP read one normed x, rotary pairs are neighbours, logits are scaled
(Cohere, 2024). In R7B only layers with a window know positions."""

from __future__ import annotations

from dataclasses import replace

from headway.model import parallel
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions, decoder_config, optional_number, stated
from headway.model.family import Decoder, decoder_of

CONVENTIONS = Conventions(
    gguf={"logit_scale": "logit_scale"},
    layer_norms=True,
    interleaved=True,
)
WINDOWED = replace(
    CONVENTIONS,
    understood=frozenset({"sliding_window"}),
    gguf={**CONVENTIONS.gguf, "attention.sliding_window": "sliding_window"},
)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    conventions = WINDOWED if checkpoint.architecture == "cohere2" else CONVENTIONS
    config, fields = decoder_config(checkpoint, conventions), stated(checkpoint, conventions)
    unrotated = frozenset(range(config.layers)) - config.windowed if conventions is WINDOWED else frozenset()
    config = replace(config, logit_scale=optional_number(fields, "logit_scale", 1.0), unrotated=unrotated)
    return decoder_of(checkpoint, fields, config, parallel.build)
