"""GPT-NeoX (20B, Pythia): attention and MLP read the same x, each through its own norm, and a head's queries, keys and
values lie together (Black et al. 2022)."""

from __future__ import annotations

from headway.model import llama, parallel
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions, decoder_config, stated
from headway.model.family import Decoder, decoder_of
from headway.model.tensors import cut_heads

CONVENTIONS = Conventions(
    understood=frozenset({"mlp_bias", "partial_rotary_factor"}),
    gguf={"use_parallel_residual": "use_parallel_residual"},
    layer_norms=True,
)


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    fields = stated(checkpoint, CONVENTIONS)
    together = fields.flag("use_parallel_residual", True)
    return decoder_of(
        checkpoint,
        fields,
        decoder_config(checkpoint, CONVENTIONS),
        parallel.build if together else llama.build,
        cuts={} if checkpoint.gguf else {"qkv": cut_heads},
        tables=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
    )
