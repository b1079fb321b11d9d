"""Nemotron 4 and Minitron: layer norms, and an MLP whose activation is a squared ReLU (Parmar et al. 2024)."""

from __future__ import annotations

from headway.model import llama
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions
from headway.model.family import Decoder, common_decoder

CONVENTIONS = Conventions(understood=frozenset({"mlp_bias", "partial_rotary_factor"}), layer_norms=True)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    return common_decoder(checkpoint, CONVENTIONS, llama.build, norms_less_one=not checkpoint.gguf)
