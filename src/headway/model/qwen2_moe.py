"""Qwen 1.5 and 2 with experts: beside those that are chosen, every row passes a shared one as far as its own gate
lets it (Yang et al. 2024)."""

from __future__ import annotations

from dataclasses import replace

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
    routing = Routing(active_experts(fields), renormalise=fields.flag("norm_topk_prob", False))
    return decoder_of(
        stacked(_squared(checkpoint)), fields, mixture(checkpoint, config, fields, routing), mixtral.build
    )


def _squared(checkpoint: Checkpoint) -> Checkpoint:
    """With the shared expert's gate as a matrix of one row; GGUF files have a vector."""
    rows = {
        name: replace(weight, shape=(1, *weight.shape))
        for name, weight in checkpoint.tensors.items()
        if name.endswith(".ffn_gate_inp_shexp.weight") and len(weight.shape) == 1
    }
    return replace(checkpoint, tensors=checkpoint.tensors | rows)
