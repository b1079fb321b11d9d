"""Mixtral: a Mistral whose layers choose two of eight experts (Jiang et al. 2024)."""

from __future__ import annotations

from headway.model.blocks import Weights, attention, forward_pass
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions, decoder_config, stated
from headway.model.family import Decoder, decoder_of
from headway.model.mixture import GGUF_KEYS, UNDERSTOOD, MixtureConfig, active_experts, feed_forward, mixture, stacked
from headway.ops.protocol import Forward, Ops, Tensor
from headway.ops.routing import Routing

CONVENTIONS = Conventions(understood=UNDERSTOOD | {"sliding_window"}, gguf=GGUF_KEYS, gguf_interleaved=True)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    config, fields = decoder_config(checkpoint, CONVENTIONS), stated(checkpoint, CONVENTIONS)
    routing = Routing(active_experts(fields), renormalise=True)
    return decoder_of(stacked(checkpoint), fields, mixture(checkpoint, config, fields, routing), build)


def build(config: MixtureConfig, weights: Weights) -> Forward:
    """The forward pass over prepared weights by role."""

    def block(ops: Ops, x: Tensor, w: Weights, layer: int) -> Tensor:
        x = attention(ops, x, w, layer, config)
        return feed_forward(ops, x, w, layer, config)

    return forward_pass(config, weights, block)
