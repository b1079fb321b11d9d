"""Qwen 3: every head of queries and keys is normed before it is rotated (Yang et al. 2025)."""

from __future__ import annotations

from headway.model import llama
from headway.model.checkpoint import Checkpoint
from headway.model.config import Dialect, decoder_config
from headway.model.family import Decoder, decoder_of
from headway.model.tensors import LAYER, QK_NORMS, attention_biases


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    config = decoder_config(checkpoint, Dialect(understood=frozenset({"sliding_window"})))
    return decoder_of(checkpoint, config, LAYER | QK_NORMS | attention_biases(checkpoint), llama.build)
