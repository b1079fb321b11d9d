"""Qwen 3: every head of queries and keys is normed before it is rotated (Yang et al. 2025)."""

from __future__ import annotations

from headway.model import llama
from headway.model.checkpoint import Checkpoint
from headway.model.config import Dialect, decoder_config, has_attention_biases
from headway.model.family import Decoder, decoder_of
from headway.model.tensors import LAYER, O_BIAS, QK_NORMS, QKV_BIASES


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    config = decoder_config(checkpoint, Dialect(understood=frozenset({"sliding_window"})))
    biases = QKV_BIASES | O_BIAS if has_attention_biases(checkpoint) else {}
    return decoder_of(checkpoint, config, LAYER | QK_NORMS | biases, llama.build)
