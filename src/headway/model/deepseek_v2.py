"""DeepSeek V2 and V2 Lite: latent attention, shared experts, experts chosen among the best groups (DeepSeek-AI 2024).

As in transformers, `norm_topk_prob` says nothing here.
"""

from __future__ import annotations

from headway.core.errors import shown
from headway.core.fields import Fields
from headway.model.checkpoint import Checkpoint
from headway.model.config import Conventions, decoder_config, stated
from headway.model.family import Decoder, decoder_of
from headway.model.latent import CUTS, build, latent
from headway.model.mixture import UNDERSTOOD, active_experts, stacked
from headway.ops.routing import Routing

CONVENTIONS = Conventions(understood=UNDERSTOOD | {"mlp_bias"})


def decoder(checkpoint: Checkpoint) -> Decoder:
    """Understand a checkpoint of this family.

    Raises:
        ModelFileError: config or tensors are not those of a model this family runs.
    """
    fields, plain = stated(checkpoint, CONVENTIONS), decoder_config(checkpoint, CONVENTIONS)
    config = latent(checkpoint, plain, fields, _routing(fields), interleaved=True)
    return decoder_of(stacked(checkpoint), fields, config, build, cuts=CUTS)


def _routing(fields: Fields) -> Routing:
    active = active_experts(fields)
    method, scale = fields.text("topk_method", "greedy"), fields.number("routed_scaling_factor", 1.0)
    if method == "greedy":
        return Routing(active, scale=scale)
    if method != "group_limited_greedy":
        raise fields.fault("topk_method", f"{shown(method)} is not supported; greedy and group_limited_greedy are")
    return Routing(active, scale=scale, groups=fields.size("n_group"), kept_groups=fields.size("topk_group"))
