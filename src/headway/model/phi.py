"""Phi-1, 1.5 and 2: attention and MLP read one normed x; biases everywhere, of the logits too (Li et al. 2023)."""

from __future__ import annotations

from headway.model import parallel
from headway.model.checkpoint import Checkpoint
from headway.model.config import Dialect, decoder_config, stated
from headway.model.family import Decoder, decoder_of
from headway.model.tensors import (
    BESIDE_LAYERS,
    LAST_NORM_BIAS,
    LAYER,
    MLP_BIASES,
    NORM_BIASES,
    O_BIAS,
    QK_NORMS,
    QKV_BIASES,
    TensorSpec,
    without,
)  # fmt: skip

HEAD_BIAS = {"head_bias": TensorSpec("lm_head.bias", "output.bias", "head", ("vocab_size",))}
QK_NORM_BIASES = {
    f"{role}_norm_bias": TensorSpec(f"self_attn.{role}_norm.bias", f"attn_{role}_norm.bias", "norm", ("head_dim",))
    for role in "qk"
}
DIALECT = Dialect(understood=frozenset({"mlp_bias", "partial_rotary_factor"}), layer_norms=True)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    layer = LAYER | QKV_BIASES | O_BIAS | MLP_BIASES | NORM_BIASES
    layer = without(layer, "gate", "gate_bias", "mlp_norm", "mlp_norm_bias")
    layer |= QK_NORMS | QK_NORM_BIASES if stated(checkpoint, DIALECT).flag("use_qk_norm", False) else {}
    beside = BESIDE_LAYERS | LAST_NORM_BIAS | HEAD_BIAS
    return decoder_of(checkpoint, decoder_config(checkpoint, DIALECT), layer, parallel.build, beside=beside)
