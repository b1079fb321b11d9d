"""EXAONE 4: norms behind attention and MLP, normed heads; beside layers with windows, others without positions (LG)."""

from __future__ import annotations

from dataclasses import replace

from headway.model import olmo2
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions, decoder_config, stated
from headway.model.family import Decoder, decoder_of

CONVENTIONS = Conventions(
    understood=frozenset({"sliding_window"}),
    gguf={
        "attention.sliding_window": "sliding_window", "attention.sliding_window_pattern": "sliding_window_pattern",
    },
)  # fmt: skip


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    config = decoder_config(checkpoint, CONVENTIONS)
    unrotated = frozenset(range(config.layers)) - config.windowed if config.windowed else frozenset[int]()
    config = replace(config, unrotated=unrotated)
    return decoder_of(checkpoint, stated(checkpoint, CONVENTIONS), config, olmo2.build)
