"""GLM-4: rotary pairs are neighbours in half of each head, gates lie with what they gate, and the releases of 2025 norm
what attention and MLP make (GLM team, 2024)."""

from __future__ import annotations

from headway.model import gemma2, llama
from headway.model.checkpoint import Checkpoint
from headway.model.config import Dialect, decoder_config, has_attention_biases
from headway.model.family import Decoder, decoder_of
from headway.model.phi3 import FUSED_GATE_UP
from headway.model.tensors import LAYER, QKV_BIASES, TensorSpec, without

DIALECT = Dialect(understood=frozenset({"partial_rotary_factor"}), interleaved=True)
POST_NORMS = {
    "attention_post_norm": TensorSpec(
        "post_self_attn_layernorm.weight", "post_attention_norm.weight", "norm", ("hidden_size",)
    ),
    "mlp_post_norm": TensorSpec("post_mlp_layernorm.weight", "post_ffw_norm.weight", "norm", ("hidden_size",)),
}


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    biases = QKV_BIASES if has_attention_biases(checkpoint) else {}
    config, layer = decoder_config(checkpoint, DIALECT), without(LAYER, "gate", "up") | FUSED_GATE_UP | biases
    if checkpoint.architecture == "glm":  # the releases of 2024
        return decoder_of(checkpoint, config, layer, llama.build)
    return decoder_of(checkpoint, config, layer | POST_NORMS, gemma2.build)
