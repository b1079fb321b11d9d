"""Command R (and R7B, cohere2): attention and MLP read one normed x, rotary pairs are neighbours, logits are scaled
(Cohere, 2024). In R7B only layers with a window know positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headway.model import parallel
from headway.model.checkpoint import Checkpoint
from headway.model.config import DecoderConfig, Dialect, decoder_config, optional_number, stated
from headway.model.family import Decoder, decoder_of
from headway.model.tensors import LAYER, TensorSpec, attention_biases, without
from headway.ops.weight import Weight

DIALECT = Dialect(
    gguf={"logit_scale": "logit_scale"},
    layer_norms=True,
    interleaved=True,
)
WINDOWED = replace(
    DIALECT,
    understood=frozenset({"sliding_window"}),
    gguf={**DIALECT.gguf, "attention.sliding_window": "sliding_window"},
)


def norm_of_each_head(role: str, heads: str) -> TensorSpec:
    """Norms of queries or keys, one of each head."""

    def cut(weight: Weight, config: DecoderConfig) -> Mapping[str, Weight]:
        return {f"{role}_norm": replace(weight, shape=(weight.shape[0] * weight.shape[1],))}

    return TensorSpec(f"self_attn.{role}_norm.weight", f"attn_{role}_norm.weight", "norm", (heads, "head_dim"), cut)


QK_NORMS = {"q_norm": norm_of_each_head("q", "heads"), "k_norm": norm_of_each_head("k", "kv_heads")}


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    dialect = WINDOWED if checkpoint.architecture == "cohere2" else DIALECT
    config, fields = decoder_config(checkpoint, dialect), stated(checkpoint, dialect)
    unrotated = frozenset(range(config.layers)) - config.windowed if dialect is WINDOWED else frozenset()
    config = replace(config, logit_scale=optional_number(fields, "logit_scale", 1.0), unrotated=unrotated)
    normed = fields.flag("use_qk_norm", "blk.0.attn_q_norm.weight" in checkpoint.tensors)
    layer = without(LAYER, "mlp_norm") | (QK_NORMS if normed else {}) | attention_biases(checkpoint)
    return decoder_of(checkpoint, config, layer, parallel.build)
