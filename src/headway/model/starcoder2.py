"""StarCoder 2: layer norms, biases everywhere, and an MLP without gates (Lozhkov et al. 2024)."""

from __future__ import annotations

from headway.model import llama
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions
from headway.model.family import Decoder, common_decoder

CONVENTIONS = Conventions(
    understood=frozenset({"mlp_bias", "sliding_window"}),
    gguf={"attention.sliding_window": "sliding_window"},
    layer_norms=True,
)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    return common_decoder(checkpoint, CONVENTIONS, llama.build)
