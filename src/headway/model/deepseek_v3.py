"""DeepSeek V3 and R1: as V2, but scores are sigmoids, and a learned correction takes part in the choice alone, which
keeps experts evenly used (DeepSeek-AI 2024)."""

from __future__ import annotations

from dataclasses import replace

from headway.core.errors import shown
from headway.core.fields import Fields
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions, decoder_config, stated
from headway.model.family import Decoder, decoder_of
from headway.model.latent import CUTS, build, latent
from headway.model.mixture import UNDERSTOOD, active_experts, stacked
from headway.ops.routing import Routing

CONVENTIONS = Conventions(understood=UNDERSTOOD)
# Fields of the first checkpoints' configs, which newer ones leave out, and what they must say.
ONLY = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1}


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    fields, plain = stated(checkpoint, CONVENTIONS), decoder_config(checkpoint, CONVENTIONS)
    for name, value in ONLY.items():
        if fields.has(name) and fields.values[name] != value:
            raise fields.fault(name, f"{shown(fields.values[name])} is not supported; {shown(value)} is")
    config = latent(checkpoint, plain, fields, _routing(fields), fields.flag("rope_interleave", True))
    return decoder_of(stacked(_without_predictors(checkpoint, plain.layers)), fields, config, build, cuts=CUTS)


def _routing(fields: Fields) -> Routing:
    active = active_experts(fields)
    return Routing(
        active,
        sigmoid=True,
        renormalise=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 2.5),
        groups=fields.size("n_group"),
        kept_groups=fields.size("topk_group"),
        merit=2,
    )


def _without_predictors(checkpoint: Checkpoint, layers: int) -> Checkpoint:
    """Without the layers behind the last, which foretell further tokens and are not used."""
    behind = tuple(
        f"model.layers.{layers + extra}." for extra in range(checkpoint.config.maybe("num_nextn_predict_layers") or 0)
    )
    kept = {name: weight for name, weight in checkpoint.tensors.items() if not name.startswith(behind)}
    return replace(checkpoint, tensors=kept)
