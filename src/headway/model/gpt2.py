"""GPT-2: learned positions, layer norms, and matrices that its folders keep transposed (Radford et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headway.model import llama
from headway.model.checkpoint import Checkpoint
from headway.model.config import DecoderConfig, Dialect, decoder_config, stated
from headway.model.family import Decoder, decoder_of
from headway.model.phi3 import FUSED_QKV, cut_qkv
from headway.model.tensors import (
    BESIDE_LAYERS,
    LAST_NORM_BIAS,
    LAYER,
    MLP_BIASES,
    NORM_BIASES,
    O_BIAS,
    TensorSpec,
    without,
)  # fmt: skip
from headway.ops.weight import Weight

POSITIONS = {
    "positions": TensorSpec(
        "model.embed_positions.weight", "position_embd.weight", "gathered", ("context_length", "hidden_size")
    )
}
DIALECT = Dialect(understood=frozenset({"mlp_bias"}), layer_norms=True, rotary=False)


def cut_biases(fused: Weight, config: DecoderConfig) -> Mapping[str, Weight]:
    """The biases of queries, keys and values."""
    return {f"{role}_bias": bias for role, bias in cut_qkv(fused, config).items()}


QKV_BIAS = {"qkv_bias": TensorSpec("self_attn.qkv_proj.bias", "attn_qkv.bias", "attention", ("qkv_width",), cut_biases)}


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    if "wte.weight" in checkpoint.tensors:  # the first release's names
        tensors = {f"transformer.{name}": weight for name, weight in checkpoint.tensors.items()}
        checkpoint = replace(checkpoint, tensors=tensors)
    fields = stated(checkpoint, DIALECT)
    config = replace(
        decoder_config(checkpoint, DIALECT),
        attention_scale=None if fields.flag("scale_attn_weights", True) else 1.0,
        scale_by_layer=fields.flag("scale_attn_by_inverse_layer_idx", False),
    )
    matrices = without(LAYER | FUSED_QKV, "q", "k", "v", "gate")
    if not checkpoint.gguf:
        matrices = {role: transposed(role, spec) for role, spec in matrices.items()}
    layer = matrices | QKV_BIAS | O_BIAS | without(MLP_BIASES, "gate_bias") | NORM_BIASES
    beside = BESIDE_LAYERS | LAST_NORM_BIAS | POSITIONS
    return decoder_of(checkpoint, config, layer, llama.build, beside=beside, tables=("attn.bias", "attn.masked_bias"))


def transposed(role: str, spec: TensorSpec) -> TensorSpec:
    """A matrix that is kept (in, out); others as they are."""

    def cut(weight: Weight, config: DecoderConfig) -> Mapping[str, Weight]:
        upright = weight.transposed()
        return {role: upright} if spec.cut is None else spec.cut(upright, config)

    return spec if len(spec.dims) == 1 else replace(spec, dims=spec.dims[::-1], cut=cut)
