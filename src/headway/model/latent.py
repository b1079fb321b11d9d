"""Latent attention: what configs say of it, its tensors, and the block that uses it (DeepSeek V2 and its heirs)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from headway.core.fields import Fields
from headway.model.blocks import Weights, forward_pass
from headway.model.checkpoint import Checkpoint
from headway.model.config import DecoderConfig
from headway.model.mixture import MixtureConfig, feed_forward, mixture
from headway.model.rope import yarn_magnitude
from headway.ops.protocol import Forward, Ops, Tensor
from headway.ops.routing import Routing
from headway.ops.weight import Deferred, Weight, stack
from headway.shape.formats import FORMATS

INNER_EPS = 1e-6  # of the norms within attention, whatever the config says of the others


@dataclass(frozen=True, kw_only=True)
class LatentConfig(MixtureConfig):
    """A mixture with latent attention.

    Attributes:
        q_rank: numbers that queries are made of; 0 = of the residual itself.
        kv_rank: numbers that keys and values are made of.
        plain, turned, value: numbers of a head's key without and with positions, and of its value.
    """

    q_rank: int
    kv_rank: int
    plain: int
    turned: int
    value: int

    @property
    def q_width(self) -> int:
        return self.heads * (self.plain + self.turned)


def latent(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    fields: Fields,
    routing: Routing,
    interleaved: bool,
) -> LatentConfig:
    """The config of a mixture with latent attention and shared experts.

    Args:
        fields: of the checkpoint, under config.json's names.
        routing: how experts are chosen.
        interleaved: rotary pairs are neighbours.

    Raises:
        ModelFileError: a field is missing or impossible.
    """
    mixed = mixture(checkpoint, config, fields, routing)
    plain, turned = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
    scale = (plain + turned) ** -0.5 * _yarn_scale(fields)
    rope = replace(mixed.rope, interleaved=interleaved)
    return LatentConfig(
        **vars(replace(mixed, rope=rope, attention_scale=scale)),
        q_rank=fields.maybe("q_lora_rank") or 0,
        kv_rank=fields.size("kv_lora_rank"),
        plain=plain,
        turned=turned,
        value=fields.size("v_head_dim"),
    )


def _yarn_scale(fields: Fields) -> float:
    """What YaRN multiplies scores with in these models, instead of cosines and sines."""
    older = fields.group("rope_scaling")
    rope = older if older.values else fields.group("rope_parameters")
    if rope.text("rope_type", rope.text("type", "default")) == "default" or not rope.values.get("mscale_all_dim"):
        return 1.0
    return yarn_magnitude(rope.number("factor"), rope.number("mscale_all_dim")) ** 2


def cut_kv_up(weight: Weight, config: LatentConfig) -> Mapping[str, Weight]:
    """Of every head, rows of its keys' projection, then of its values'."""
    size = config.plain + config.value
    heads = [weight.rows(head * size, (head + 1) * size) for head in range(config.heads)]
    keys = [_turned(head.rows(0, config.plain)) for head in heads]
    values = [head.rows(config.plain, size) for head in heads]
    return {"key_up": stack(f"{weight.name} (keys)", keys), "value_up": stack(f"{weight.name} (values)", values)}


def _turned(keys: Weight) -> Weight:
    """The transpose; of quantised blocks, which cannot be turned, as 16-bit numbers."""
    if FORMATS[keys.format].numbers == 1:
        return keys.transposed()

    def make() -> np.ndarray:
        return np.ascontiguousarray(keys.dequantise().T, np.float16).view(np.uint8)

    rows, columns = keys.shape
    return replace(keys, shape=(columns, rows), format="f16", data=Deferred(2 * rows * columns, make))


CUTS = {"kv_b": cut_kv_up}


def latent_attention(ops: Ops, x: Tensor, w: Weights, layer: int, config: LatentConfig) -> Tensor:
    """x + what the queries of the normed x find."""
    h = ops.rms_norm(x, w["attention_norm"], config.norm_eps)
    if config.q_rank:
        q = ops.rms_norm(ops.linear(h, w["q_a"], w.get("q_a_bias")), w["q_a_norm"], INNER_EPS)
        q = ops.linear(q, w["q_b"])
    else:
        q = ops.linear(h, w["q"])
    vector = ops.linear(h, w["kv_a"], w.get("kv_a_bias"))
    assert config.attention_scale is not None, "a config of latent attention has one"
    attended = ops.latent_attention(
        q, vector, w["kv_norm"], w["key_up"], w["value_up"], layer, config.attention_scale, config.rope, INNER_EPS
    )
    return ops.all_reduce(ops.linear(attended, w["o"], w.get("o_bias"), residual=x))


def build(config: LatentConfig, weights: Weights) -> Forward:
    """The forward pass over prepared weights by role."""

    def block(ops: Ops, x: Tensor, w: Weights, layer: int) -> Tensor:
        x = latent_attention(ops, x, w, layer, config)
        return feed_forward(ops, x, w, layer, config)

    return forward_pass(config, weights, block)
