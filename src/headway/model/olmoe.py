"""OLMoE: experts, and queries and keys that are normed over all heads together (Muennighoff et al. 2024)."""

from __future__ import annotations

from headway.model import mixtral
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions, decoder_config, stated
from headway.model.family import Decoder, decoder_of
from headway.model.mixture import GGUF_KEYS, UNDERSTOOD, active_experts, mixture, stacked
from headway.ops.routing import Routing

CONVENTIONS = Conventions(understood=UNDERSTOOD, gguf=GGUF_KEYS)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    fields, config = stated(checkpoint, CONVENTIONS), decoder_config(checkpoint, CONVENTIONS)
    routing = Routing(active_experts(fields), renormalise=fields.flag("norm_topk_prob", False))
    config = mixture(checkpoint, config, fields, routing)
    return decoder_of(stacked(checkpoint), fields, config, mixtral.build)
