"""GLM-4: rotary pairs are neighbours in half of each head, gates lie with what they gate, and the releases of 2025 norm
what attention and MLP make (GLM team, 2024)."""

from __future__ import annotations

from headway.model import gemma2, llama
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions
from headway.model.family import Decoder, common_decoder

CONVENTIONS = Conventions(understood=frozenset({"partial_rotary_factor"}), interleaved=True)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    older = checkpoint.architecture == "glm"  # the releases of 2024
    return common_decoder(checkpoint, CONVENTIONS, llama.build if older else gemma2.build)
