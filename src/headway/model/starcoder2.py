"""StarCoder 2: layer norms, biases everywhere, and an MLP without gates (Lozhkov et al. 2024)."""

from __future__ import annotations

from headway.model import llama
from headway.model.checkpoint import Checkpoint
from headway.model.config import Dialect, decoder_config
from headway.model.family import Decoder, decoder_of
from headway.model.tensors import BESIDE_LAYERS, LAST_NORM_BIAS, NORM_BIASES, without

DIALECT = Dialect(
    understood=frozenset({"mlp_bias", "sliding_window"}),
    gguf={"attention.sliding_window": "sliding_window"},
    layer_norms=True,
)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    layer = without(llama.layer_of(checkpoint) | NORM_BIASES, "gate", "gate_bias")
    config = decoder_config(checkpoint, DIALECT)
    return decoder_of(checkpoint, config, layer, llama.build, beside=BESIDE_LAYERS | LAST_NORM_BIAS)
