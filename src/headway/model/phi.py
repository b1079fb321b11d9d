"""Phi-1, 1.5 and 2: attention and MLP read one normed x; biases everywhere, of the logits too (Li et al. 2023)."""

from __future__ import annotations

from headway.model import parallel
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions
from headway.model.family import Decoder, common_decoder

CONVENTIONS = Conventions(understood=frozenset({"mlp_bias", "partial_rotary_factor"}), layer_norms=True)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    return common_decoder(checkpoint, CONVENTIONS, parallel.build)
