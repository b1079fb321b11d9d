"""Qwen 3 with experts (Yang et al. 2025)."""

from __future__ import annotations

from headway.model import mixtral
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions, decoder_config, stated
from headway.model.family import Decoder, decoder_of
from headway.model.mixture import GGUF_KEYS, UNDERSTOOD, active_experts, mixture, stacked
from headway.ops.routing import Routing

CONVENTIONS = Conventions(understood=UNDERSTOOD | {"sliding_window"}, gguf=GGUF_KEYS)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    fields, config = stated(checkpoint, CONVENTIONS), decoder_config(checkpoint, CONVENTIONS)
    renormalise = fields.flag("norm_topk_prob", checkpoint.gguf)  # a GGUF does not say it; all that there are do
    routing = Routing(active_experts(fields), renormalise=renormalise)
    return decoder_of(stacked(checkpoint), fields, mixture(checkpoint, config, fields, routing), mixtral.build)
