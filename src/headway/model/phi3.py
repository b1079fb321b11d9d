"""Phi-3 and Phi-4: a Llama whose queries, keys and values are one matrix, as are gates and what they gate (Abdin et al.
2024)."""

from __future__ import annotations

from collections.abc import Mapping

from headway.model import llama
from headway.model.checkpoint import Checkpoint
from headway.model.config import DecoderConfig, Dialect, decoder_config
from headway.model.family import Decoder, decoder_of
from headway.model.tensors import LAYER, TensorSpec, without
from headway.ops.weight import Weight


def cut_qkv(fused: Weight, config: DecoderConfig) -> Mapping[str, Weight]:
    """Rows of queries, then of keys, then of values."""
    keys, values = config.q_width, config.q_width + config.kv_width
    return {"q": fused.rows(0, keys), "k": fused.rows(keys, values), "v": fused.rows(values, config.qkv_width)}


def cut_gate_up(fused: Weight, config: DecoderConfig) -> Mapping[str, Weight]:
    """Rows of gates, then of what they gate."""
    gates = config.intermediate_size
    return {"gate": fused.rows(0, gates), "up": fused.rows(gates, config.gate_up_width)}


FUSED_QKV = {
    "qkv": TensorSpec(
        "self_attn.qkv_proj.weight", "attn_qkv.weight", "attention", ("qkv_width", "hidden_size"), cut_qkv
    )
}
FUSED_GATE_UP = {
    "gate_up": TensorSpec(
        "mlp.gate_up_proj.weight", "ffn_up.weight", "mlp", ("gate_up_width", "hidden_size"), cut_gate_up
    )
}
DIALECT = Dialect(
    understood=frozenset({"partial_rotary_factor", "sliding_window"}),
    gguf={"attention.sliding_window": "sliding_window"},
)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    layer = without(LAYER, "q", "k", "v", "gate", "up") | FUSED_QKV | FUSED_GATE_UP
    return decoder_of(checkpoint, decoder_config(checkpoint, DIALECT), layer, llama.build)
