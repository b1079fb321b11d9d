"""Qwen 1.5 and 2 with experts: beside those that are chosen, every row passes a shared one as far as its own gate
lets it (Yang et al. 2024)."""

from __future__ import annotations

from dataclasses import replace

from headway.model import mixtral
from headway.model.checkpoint import Checkpoint
from headway.model.config import Dialect, decoder_config, has_attention_biases, stated
from headway.model.family import Decoder, decoder_of
from headway.model.mixture import (
    GGUF_KEYS,
    SPARSE,
    UNDERSTOOD,
    mixture,
    mixture_layers,
    shared_experts,
    sparse_layers,
    stacked,
)
from headway.model.tensors import LAYER, QKV_BIASES, TensorSpec
from headway.ops.routing import Routing

DIALECT = Dialect(understood=UNDERSTOOD | {"sliding_window"}, gguf=GGUF_KEYS)
SHARED = shared_experts("shared_expert") | {
    "shared_switch": TensorSpec(
        "mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight", "shared", ("one", "hidden_size")
    )
}


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    fields, config = stated(checkpoint, DIALECT), decoder_config(checkpoint, DIALECT)

    def routing(active: int) -> Routing:
        return Routing(active, renormalise=fields.flag("norm_topk_prob", False))

    sparse = sparse_layers(checkpoint, fields, config.layers)
    shared = fields.size("shared_expert_intermediate_size")
    config = mixture(config, fields, sparse, routing, "moe_intermediate_size", shared)
    layers = mixture_layers(config, LAYER | (QKV_BIASES if has_attention_biases(checkpoint) else {}), SPARSE | SHARED)
    return decoder_of(stacked(_squared(checkpoint)), config, layers, mixtral.build)


def _squared(checkpoint: Checkpoint) -> Checkpoint:
    """With the shared expert's gate as a matrix of one row; GGUF files have a vector."""
    rows = {
        name: replace(weight, shape=(1, *weight.shape))
        for name, weight in checkpoint.tensors.items()
        if name.endswith(".ffn_gate_inp_shexp.weight") and len(weight.shape) == 1
    }
    return replace(checkpoint, tensors=checkpoint.tensors | rows)
