"""GPT-NeoX (20B, Pythia): attention and MLP read the same x, each through its own norm, and a head's queries, keys and
values lie together (Black et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headway.model import llama, parallel
from headway.model.checkpoint import Checkpoint
from headway.model.config import DecoderConfig, Dialect, decoder_config, has_attention_biases, stated
from headway.model.family import Decoder, decoder_of
from headway.model.gpt2 import QKV_BIAS
from headway.model.phi3 import FUSED_QKV
from headway.model.tensors import BESIDE_LAYERS, LAST_NORM_BIAS, LAYER, MLP_BIASES, NORM_BIASES, O_BIAS, without
from headway.ops.weight import Weight

DIALECT = Dialect(
    understood=frozenset({"mlp_bias", "partial_rotary_factor"}),
    gguf={"use_parallel_residual": "use_parallel_residual"},
    layer_norms=True,
)


def cut_heads(fused: Weight, config: DecoderConfig) -> Mapping[str, Weight]:
    """Rows of the first head's queries, keys and values, then of the next head's."""
    return {role: fused.dealt(part, 3, config.head_dim) for part, role in enumerate("qkv")}


def cut_head_biases(fused: Weight, config: DecoderConfig) -> Mapping[str, Weight]:
    """The same of biases."""
    return {f"{role}_bias": bias for role, bias in cut_heads(fused, config).items()}


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    biased = checkpoint.gguf or has_attention_biases(checkpoint)
    qkv, bias = FUSED_QKV["qkv"], QKV_BIAS["qkv_bias"]
    if not checkpoint.gguf:
        qkv, bias = replace(qkv, cut=cut_heads), replace(bias, cut=cut_head_biases)
    layer = without(LAYER | MLP_BIASES | NORM_BIASES, "q", "k", "v", "gate", "gate_bias") | {"qkv": qkv}
    layer |= {"qkv_bias": bias} | O_BIAS if biased else {}
    together = stated(checkpoint, DIALECT).flag("use_parallel_residual", True)
    return decoder_of(
        checkpoint,
        decoder_config(checkpoint, DIALECT),
        layer,
        parallel.build if together else llama.build,
        beside=BESIDE_LAYERS | LAST_NORM_BIAS,
        tables=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
    )
