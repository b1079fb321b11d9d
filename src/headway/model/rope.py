"""Rotary position embeddings: what checkpoints say of them, and the angles that follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headway.core.errors import shown
from headway.core.fields import Fields
from headway.ops.protocol import Rope
from headway.ops.weight import Weight

FACTORS = "rope_freqs.weight"  # of a GGUF: what each pair's frequency is divided by, llama.cpp's form of llama3 scaling


@dataclass(frozen=True)
class Llama3Scaling:
    """Parameters of Llama 3.1's rope scaling: longer waves than original_context / low_freq_factor are slowed by
    `factor`, shorter ones than original_context / high_freq_factor are kept, those between are interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class RopeConfig:
    """A model's rotary positions.

    Attributes:
        theta: base of the frequencies.
        linear: positions are divided by this (1 = no linear scaling).
        llama3: Llama 3.1's scaling; None = none.
        factors: what each pair's frequency is divided by; () = 1.
        interleaved: pairs are neighbours, instead of half a head apart.
    """

    theta: float
    linear: float = 1.0
    llama3: Llama3Scaling | None = None
    factors: tuple[float, ...] = ()
    interleaved: bool = False

    def of(self, width: int) -> Rope:
        """The rope of heads of `width`."""
        inv_freq = inverse_frequencies(width, self.theta) / self.linear
        if self.llama3 is not None:
            inv_freq = llama3(inv_freq, self.llama3)
        if self.factors:
            inv_freq = inv_freq / np.array(self.factors)
        return Rope(inv_freq.astype(np.float32), self.interleaved)


def inverse_frequencies(width: int, theta: float) -> np.ndarray:
    """theta^(-2i/width) for pair i, float64 [width / 2] (Su et al., RoFormer, 2021)."""
    return theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)


def llama3(inv_freq: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Scaled frequencies, float64 [width / 2] (`apply_scaling` in Meta's llama-models)."""
    turns = scaling.original_context * inv_freq / (2 * np.pi)  # of each pair over the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return inv_freq * (kept + (1 - kept) / scaling.factor)


def rope_from_hf(fields: Fields) -> RopeConfig:
    """From config.json. Newer files say `rope_parameters`, older `rope_scaling`. Where a file has both, `rope_scaling`
    counts alone, as in transformers 5; what would be lost of theta that way is refused."""
    newer, older = fields.group("rope_parameters"), fields.group("rope_scaling")
    rope = older if older.values else newer
    for name, value in rope.values.items():
        if isinstance(value, dict):
            raise rope.fault(name, "a rope of its own per kind of layer is not supported")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    if newer.number("rope_theta", theta) != theta:
        raise newer.fault(
            "rope_theta", f"{shown(newer.values['rope_theta'])} contradicts {theta:g}, which rope_scaling implies"
        )
    kind = rope.text("rope_type", rope.text("type", "default"))
    if rope.has("partial_rotary_factor") and rope.number("partial_rotary_factor") != 1:
        raise rope.fault("partial_rotary_factor", "only 1 is supported")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, linear=rope.number("factor"))
    if kind != "llama3":
        raise rope.fault("rope_type", f"{shown(kind)} is not supported; default, linear and llama3 are")
    scaling = Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_context=rope.size("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise rope.fault("high_freq_factor", "must be above low_freq_factor")
    return RopeConfig(theta, llama3=scaling)


def rope_from_gguf(fields: Fields, tensors: Mapping[str, Weight], width: int, interleaved: bool) -> RopeConfig:
    """From the metadata of a GGUF's architecture and its tensor of factors. width: of a head."""
    kind = fields.text("rope.scaling.type", "linear")  # what llama.cpp takes it for; the factor is 1 if not given
    if kind not in ("none", "linear"):
        raise fields.fault("rope.scaling.type", f"{shown(kind)} is not supported; none and linear are")
    linear = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    return RopeConfig(
        theta=fields.number("rope.freq_base", 10000.0),
        linear=1.0 if kind == "none" else linear,
        factors=_factors(fields, tensors[FACTORS], width // 2) if FACTORS in tensors else (),
        interleaved=interleaved,
    )


def _factors(fields: Fields, weight: Weight, pairs: int) -> tuple[float, ...]:
    factors = weight.dequantise() if weight.shape == (pairs,) else np.zeros(1)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise fields.fault(f"tensor {FACTORS}", f"must hold {pairs} positive numbers, one per rotary pair")
    return tuple(factors.tolist())
