"""Granite 3: a Llama with four multipliers: of embeddings, scores, logits, and of what each block adds (IBM, 2024)."""

from __future__ import annotations

from dataclasses import replace

from headway.core.fields import Fields
from headway.model import llama
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions, DecoderConfig, decoder_config, optional_number, stated
from headway.model.family import Decoder, decoder_of

CONVENTIONS = Conventions(
    understood=llama.CONVENTIONS.understood
    | {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"},
    gguf={
        "embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
        "attention.scale": "attention_multiplier", "logit_scale": "logits_scaling",
    },
    gguf_interleaved=True,
)  # fmt: skip


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    fields = stated(checkpoint, CONVENTIONS)
    config = multiplied(decoder_config(checkpoint, CONVENTIONS), checkpoint, fields)
    return decoder_of(checkpoint, fields, config, llama.build)


def multiplied(config: DecoderConfig, checkpoint: Checkpoint, fields: Fields) -> DecoderConfig:
    """The config with the multipliers that the fields state."""
    # The residual stream is kept divided by its multiplier: then blocks add to it as they are, and norms, which undo
    # any factor, see the same numbers if their epsilon is divided by its square.
    residual = optional_number(fields, "residual_multiplier", 1.0)
    unsaid = config.head_dim**-0.5 if checkpoint.gguf else 1.0  # as llama.cpp and transformers scale scores then
    return replace(
        config,
        embedding_scale=optional_number(fields, "embedding_multiplier", 1.0) / residual,
        norm_eps=config.norm_eps / residual**2,
        attention_scale=optional_number(fields, "attention_multiplier", unsaid),
        logit_scale=1 / optional_number(fields, "logits_scaling", 1.0),
    )
