"""Nemotron 4 and Minitron: layer norms, and an MLP whose activation is a squared ReLU (Parmar et al. 2024)."""

from __future__ import annotations

from headway.model import llama
from headway.model.checkpoint import Checkpoint
from headway.model.config import Dialect, decoder_config
from headway.model.family import Decoder, decoder_of
from headway.model.tensors import BESIDE_LAYERS, LAST_NORM_BIAS, NORM_BIASES, without

DIALECT = Dialect(understood=frozenset({"mlp_bias", "partial_rotary_factor"}), layer_norms=True)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    return decoder_of(
        checkpoint,
        decoder_config(checkpoint, DIALECT),
        without(llama.layer_of(checkpoint) | NORM_BIASES, "gate", "gate_bias"),
        llama.build,
        beside=BESIDE_LAYERS | LAST_NORM_BIAS,
        norms_less_one=not checkpoint.gguf,
    )
