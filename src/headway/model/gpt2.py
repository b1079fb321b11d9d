"""GPT-2: learned positions, layer norms, and matrices that its folders keep transposed (Radford et al. 2019)."""

from __future__ import annotations

from dataclasses import replace

from headway.model import llama
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions, decoder_config, stated
from headway.model.family import Decoder, decoder_of

CONVENTIONS = Conventions(understood=frozenset({"mlp_bias"}), layer_norms=True, rotary=False)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    if "wte.weight" in checkpoint.tensors:  # the first release's names
        tensors = {f"transformer.{name}": weight for name, weight in checkpoint.tensors.items()}
        checkpoint = replace(checkpoint, tensors=tensors)
    fields = stated(checkpoint, CONVENTIONS)
    config = replace(
        decoder_config(checkpoint, CONVENTIONS),
        attention_scale=None if fields.flag("scale_attn_weights", True) else 1.0,
        scale_by_layer=fields.flag("scale_attn_by_inverse_layer_idx", False),
    )
    return decoder_of(checkpoint, fields, config, llama.build, tables=("attn.bias", "attn.masked_bias"))
