"""Qwen 3: every head of queries and keys is normed before it is rotated (Yang et al. 2025)."""

from __future__ import annotations

from headway.model import llama
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions
from headway.model.family import Decoder, common_decoder

CONVENTIONS = Conventions(understood=frozenset({"sliding_window"}))


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    return common_decoder(checkpoint, CONVENTIONS, llama.build)
