"""Gemma 3, its text model: a Gemma 2 whose heads of queries and keys are normed, and whose layers with a window have
rotary positions of their own (Gemma team, 2025)."""

from __future__ import annotations

from dataclasses import replace

from headway.model import gemma2
from headway.model.checkpoint import Checkpoint
from headway.model.config import decoder_config, stated
from headway.model.family import Decoder, decoder_of
from headway.model.rope import inverse_frequencies, rope, rope_fields, rope_from_hf

SCALED_BY_WIDTH = 62  # layers of the 27B
# attn_logit_softcapping is "understood" as in transformers, whose Gemma 3 has the field and never caps scores.
CONVENTIONS = replace(
    gemma2.CONVENTIONS,
    gguf={
        **gemma2.CONVENTIONS.gguf,
        "attention.sliding_window_pattern": "sliding_window_pattern",
        "rope.freq_base_swa": "rope_local_base_freq",
    },
)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    own = checkpoint
    if not checkpoint.gguf:
        full = rope_fields(own.config, "full_attention", own.config.number("rope_theta"), "rope_scaling")
        own = replace(own, config=full)
    config = gemma2.scaled(own, decoder_config(own, CONVENTIONS), CONVENTIONS, SCALED_BY_WIDTH)
    if checkpoint.gguf:
        theta = stated(own, CONVENTIONS).number("rope_local_base_freq", 1e4)
        local = rope(inverse_frequencies(config.head_dim, theta))
    else:
        theta = checkpoint.config.number("rope_local_base_freq")
        local = rope_from_hf(rope_fields(checkpoint.config, "sliding_attention", theta), config.head_dim)
    config = replace(config, local_rope=local)
    return decoder_of(own, stated(own, CONVENTIONS), config, gemma2.build, norms_less_one=not own.gguf)
