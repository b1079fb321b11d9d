"""Falcon (7B, 40B, 180B, 2-11B): attention and MLP side by side, layer norms without biases beside them; queries lie
together with the key and value that they share (Almazrouei et al. 2023)."""

from __future__ import annotations

from headway.model import llama, parallel
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions, decoder_config, stated
from headway.model.family import Decoder, decoder_of
from headway.model.tensors import cut_heads
from headway.shape.families import FAMILIES

CONVENTIONS = Conventions(understood=frozenset({"mlp_bias"}), layer_norms=True)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    fields, two_norms = stated(checkpoint, CONVENTIONS), checkpoint.architecture == "falcon_40b"
    if checkpoint.gguf:
        two_norms = "blk.0.attn_norm_2.weight" in checkpoint.tensors
        fields = fields.holding({**fields.values, "use_parallel_residual": True})
    together = fields.flag("use_parallel_residual")
    norms, grouped = fields.maybe("num_ln_in_parallel_attn"), fields.flag("new_decoder_architecture")
    if norms is not None and norms != (2 if two_norms else 1):
        raise fields.fault("num_ln_in_parallel_attn", f"{norms} norms are not those of this kind of Falcon")
    if grouped and not fields.flag("parallel_attn", True):
        raise fields.fault("parallel_attn", "false is not supported with new_decoder_architecture")
    return decoder_of(
        checkpoint,
        fields,
        decoder_config(checkpoint, CONVENTIONS),
        parallel.build if together else llama.build,
        family=FAMILIES["falcon_40b" if two_norms else "falcon"],
        cuts={} if checkpoint.gguf else {"qkv": cut_heads},
    )
