"""OLMo 3: an OLMo 2 with a window in three of four layers (OLMo team, 2025)."""

from __future__ import annotations

from dataclasses import replace

from headway.model import olmo2
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions, decoder_config
from headway.model.family import Decoder, decoder_of
from headway.model.rope import rope_fields, rope_from_hf

THETA = 500000.0
CONVENTIONS = Conventions(understood=frozenset({"sliding_window"}))


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    fields = checkpoint.config
    full = rope_fields(fields, "full_attention", fields.number("rope_theta"), "rope_scaling")
    config = decoder_config(replace(checkpoint, config=full), CONVENTIONS)
    local = rope_from_hf(rope_fields(fields, "sliding_attention", THETA), config.head_dim)
    return decoder_of(checkpoint, fields, replace(config, local_rope=local), olmo2.build)
