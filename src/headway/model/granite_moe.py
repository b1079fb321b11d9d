"""Granite 3 with experts: Granite's multipliers around Mixtral's layers (IBM, 2024)."""

from __future__ import annotations

from dataclasses import replace

from headway.model import granite, mixtral
from headway.model.checkpoint import Checkpoint
from headway.model.config import decoder_config, stated
from headway.model.family import Decoder, decoder_of
from headway.model.mixture import GGUF_KEYS, UNDERSTOOD, active_experts, mixture, stacked
from headway.ops.routing import Routing

CONVENTIONS = replace(
    granite.CONVENTIONS,
    understood=(granite.CONVENTIONS.understood | UNDERSTOOD) - {"mlp_bias"},
    gguf=GGUF_KEYS | dict(granite.CONVENTIONS.gguf),
)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    fields, plain = stated(checkpoint, CONVENTIONS), decoder_config(checkpoint, CONVENTIONS)
    routing = Routing(active_experts(fields), renormalise=True)  # the softmax over the chosen alone
    config = mixture(checkpoint, granite.multiplied(plain, checkpoint, fields), fields, routing)
    return decoder_of(stacked(checkpoint), fields, config, mixtral.build)
