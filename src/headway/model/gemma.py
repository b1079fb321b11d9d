"""Gemma: a Llama with scaled embeddings, a GELU and norms that start as zeros (Gemma team, 2024)."""

from __future__ import annotations

from dataclasses import replace

from headway.model import llama
from headway.model.checkpoint import Checkpoint
from headway.model.config import decoder_config, stated
from headway.model.family import Decoder, decoder_of


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    config = decoder_config(checkpoint)
    # The first files say "gelu" and mean its approximation, as transformers takes it.
    activation = "gelu_tanh" if config.activation == "gelu" else config.activation
    config = replace(config, embedding_scale=config.hidden_size**0.5, activation=activation)
    return decoder_of(checkpoint, stated(checkpoint), config, llama.build, norms_less_one=not checkpoint.gguf)
