"""Rotary position embeddings: what checkpoints say of them, and the angles that follow.

A rope is frequencies, one per pair of numbers of a head, and a factor on cosines and sines. Kinds are named as in
transformers, and agree with its `modeling_rope_utils`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headway.core.errors import shown
from headway.core.fields import MAX_CONTEXT, Fields
from headway.ops.protocol import Rope
from headway.ops.weight import Weight

LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"  # of a GGUF: the same of two lengths
FACTORS = "rope_freqs.weight"  # of a GGUF: what each pair's frequency is divided by, llama.cpp's form of llama3 scaling


@dataclass(frozen=True)
class Scale:
    """What the scaling of a rope starts from.

    Attributes:
        theta: base of the frequencies.
        width: numbers of a head that are rotated.
        head: numbers of a head.
        original: positions that the model was trained on before its rope was scaled.
        context: positions that it was made for, scaled.
    """

    theta: float
    width: int
    head: int
    original: int
    context: int

    @property
    def inv_freq(self) -> np.ndarray:
        return inverse_frequencies(self.width, self.theta)


def inverse_frequencies(width: int, theta: float) -> np.ndarray:
    """theta^(-2i/width) for pair i, float64 [width / 2, rounded up] (Su et al., RoFormer, 2021)."""
    return theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)


def rope(inv_freq: Sequence[float] | np.ndarray, magnitude: float = 1.0, interleaved: bool = False) -> Rope:
    """A rope of such frequencies."""
    return Rope(tuple(np.asarray(inv_freq, np.float32).tolist()), interleaved, magnitude)


def _default(fields: Fields, scale: Scale) -> Rope:
    return rope(scale.inv_freq)


def _linear(fields: Fields, scale: Scale) -> Rope:
    """Positions are divided (Chen et al., Position Interpolation, 2023)."""
    return rope(scale.inv_freq / fields.number("factor"))


def _proportional(fields: Fields, scale: Scale) -> Rope:
    """The first pairs turn as those of a head rotated whole; the others do not."""
    turning = scale.width // 2
    inv_freq = inverse_frequencies(scale.head, scale.theta)
    inv_freq[turning:] = 0.0
    return rope(inv_freq / fields.number("factor", 1.0))


def _llama3(fields: Fields, scale: Scale) -> Rope:
    """Waves longer than original / low_freq_factor are slowed by `factor`, those shorter than original /
    high_freq_factor are kept, those between interpolated (`apply_scaling` in Meta's llama-models)."""
    factor, low, high = (fields.number(name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    if high <= low:
        raise fields.fault("high_freq_factor", "must be above low_freq_factor")
    turns = scale.original * scale.inv_freq / (2 * np.pi)  # of each pair over the original context
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return rope(scale.inv_freq * (kept + (1 - kept) / factor))


def _yarn(fields: Fields, scale: Scale) -> Rope:
    """Slow pairs are interpolated, fast ones kept, those between mixed (Peng et al., YaRN, 2023)."""
    factor = fields.number("factor", scale.context / scale.original)
    if fields.has("attention_factor"):
        magnitude = fields.number("attention_factor")
    elif fields.values.get("mscale") and fields.values.get("mscale_all_dim"):
        magnitude = yarn_magnitude(factor, fields.number("mscale")) / yarn_magnitude(
            factor, fields.number("mscale_all_dim")
        )
    else:
        magnitude = yarn_magnitude(factor)
    fast, slow = (fields.values.get(name) and fields.number(name) for name in ("beta_fast", "beta_slow"))
    kept = yarn_kept(scale, fast or 32.0, slow or 1.0, fields.flag("truncate", True))
    return rope(scale.inv_freq * (kept + (1 - kept) / factor), magnitude)


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """YaRN's factor on cosines and sines: attention's temperature grows with the context."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def yarn_kept(scale: Scale, fast: float, slow: float, truncate: bool = True) -> np.ndarray:
    """How far each pair keeps its frequency: 1 if it turns more than `fast` times over the original context, 0 if less
    than `slow` times, float64 [pairs]."""
    last = scale.width - 1

    def pair_that_turns(times: float) -> float:
        return scale.width * math.log(scale.original / (times * 2 * math.pi)) / (2 * math.log(scale.theta))

    low, high = pair_that_turns(fast), pair_that_turns(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, last)
    span = high - low or 0.001
    return 1 - np.clip((np.arange(len(scale.inv_freq)) - low) / span, 0.0, 1.0)


def _dynamic(fields: Fields, scale: Scale) -> Rope:
    """Frequencies that slow down with every token behind the model's positions, where it is not run: the others."""
    fields.number("factor")
    return rope(scale.inv_freq)


def _longrope(fields: Fields, scale: Scale) -> Rope:
    """Each pair is slowed by a factor of its own, by another one in sequences longer than the original context (Ding et
    al., LongRoPE, 2024)."""
    pairs = len(scale.inv_freq)
    short, long = (np.array(fields.numbers(f"{length}_factor", pairs)) for length in ("short", "long"))
    factor = fields.number("factor", scale.context / scale.original)
    magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(scale.original))
    return long_rope(scale, short, long, fields.number("attention_factor", magnitude))


def long_rope(scale: Scale, short: np.ndarray, long: np.ndarray, magnitude: float, interleaved: bool = False) -> Rope:
    """A rope of two lengths."""
    found = rope(scale.inv_freq / short, magnitude, interleaved)
    return replace(found, longer=rope(scale.inv_freq / long).inv_freq, original=scale.original)


KINDS: Mapping[str, Callable[[Fields, Scale], Rope]] = {
    "default": _default, "linear": _linear, "dynamic": _dynamic, "proportional": _proportional, "llama3": _llama3,
    "yarn": _yarn, "longrope": _longrope,
}  # fmt: skip
_WITH_ORIGINAL = ("llama3", "yarn", "longrope")  # kinds that know how long the model was before


def rope_from_hf(fields: Fields, head: int, layer_type: str = "", partial: bool = False) -> Rope:
    """From config.json. Newer files say `rope_parameters`, older `rope_scaling`. Where a file has both, `rope_scaling`
    counts alone, as in transformers 5; what would be lost of theta that way is refused.

    Args:
        head: numbers of a head.
        layer_type: whose layers' rope is wanted, where the file has one for each; "" = the model's one.
        partial: the family may rotate a part of each head, `partial_rotary_factor`.

    Raises:
        ModelFileError: a kind or a parameter is unknown, or impossible.
    """
    newer, older = fields.group("rope_parameters"), fields.group("rope_scaling")
    stated = older if older.values else newer
    apart = [name for name, value in stated.values.items() if isinstance(value, dict)]
    if apart and layer_type not in apart:
        raise stated.fault(layer_type or apart[0], "a rope of its own per kind of layer is not supported")
    if apart:
        stated, newer = stated.group(layer_type), newer.group(layer_type)
    theta = stated.number("rope_theta", fields.number("rope_theta", 10000.0))
    if newer.number("rope_theta", theta) != theta:
        raise newer.fault(
            "rope_theta", f"{shown(newer.values['rope_theta'])} contradicts {theta:g}, which rope_scaling implies"
        )
    kind = stated.text("rope_type", stated.text("type", "default"))
    kind = "longrope" if kind == "su" or (kind == "yarn" and stated.has("long_factor")) else kind  # as Phi-3 once said
    if kind not in KINDS:
        raise stated.fault("rope_type", f"{shown(kind)} is not supported; {', '.join(KINDS)} are")
    share = stated.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if share > 1 or (share < 1 and not partial and kind != "proportional"):
        raise stated.fault("partial_rotary_factor", f"{share:g} is not supported for this kind of model; 1 is")
    context = fields.size("max_position_embeddings")
    original = context
    if kind in _WITH_ORIGINAL:
        original = _original(fields, stated, context, bool(apart))
    return KINDS[kind](stated, Scale(theta, int(head * share), head, original, context))


def _original(fields: Fields, stated: Fields, context: int, apart: bool) -> int:
    """The length before scaling; what stands beside a model's one rope goes before what stands in it."""
    name = "original_max_position_embeddings"
    if fields.has(name) and not apart:
        return fields.size(name)
    return stated.size(name) if name in stated.values else context


LAYER_KINDS = ("full_attention", "sliding_attention")


def rope_fields(fields: Fields, kind: str, theta: float, scaling: str = "") -> Fields:
    """The fields, with the rope of one kind of layer as their only one. Newer files have a rope per kind; older ones
    say no more than theta, and `scaling` of the full layers alone. theta: where the rope does not say it."""
    nested = fields.group("rope_parameters")
    for name in nested.values:
        if name not in LAYER_KINDS:
            raise nested.fault(name, f"is not a kind of layer; accepted: {', '.join(LAYER_KINDS)}")
    older = fields.group(scaling).values if scaling else {}
    values = {"rope_theta": theta, **nested.group(kind).values, **older}
    return fields.holding({**fields.values, "rope_parameters": values, "rope_scaling": None})


def scaled_context(fields: Fields, context: int) -> int:
    """Positions that YaRN makes of a model's, where its config.json still states those it had before (as Qwen's)."""
    older = fields.group("rope_scaling")
    stated = older if older.values else fields.group("rope_parameters")
    if stated.text("rope_type", stated.text("type", "default")) != "yarn" or not stated.has("factor"):
        return context
    scaled = _original(fields, stated, context, apart=False) * stated.number("factor")
    if scaled > MAX_CONTEXT:
        raise stated.fault("factor", f"makes {scaled:g} positions; at most {MAX_CONTEXT} are accepted")
    return max(context, int(scaled))


def rope_from_gguf(fields: Fields, tensors: Mapping[str, Weight], head: int, interleaved: bool) -> Rope:
    """From the metadata of a GGUF's architecture and its tensor of factors. head: numbers of a head."""
    kind = fields.text("rope.scaling.type", "linear")  # what llama.cpp takes it for; the factor is 1 if not given
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise fields.fault("rope.scaling.type", f"{shown(kind)} is not supported; none, linear, yarn and longrope are")
    context = fields.size("context_length")
    scale = Scale(
        theta=fields.number("rope.freq_base", 10000.0),
        width=fields.size("rope.dimension_count", default=head, most=head),
        head=head,
        original=fields.size("rope.scaling.original_context_length", default=context),
        context=context,
    )
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    inv_freq, magnitude = scale.inv_freq, fields.number("rope.scaling.attn_factor", 1.0)
    if kind == "linear":
        inv_freq = inv_freq / factor
    elif kind == "yarn":
        fast, slow = (
            fields.number("rope.scaling.yarn_beta_fast", 32.0),
            fields.number("rope.scaling.yarn_beta_slow", 1.0),
        )
        kept = yarn_kept(scale, fast, slow)
        inv_freq, magnitude = inv_freq * (kept + (1 - kept) / factor), magnitude * yarn_magnitude(factor)
    if LONG in tensors and SHORT in tensors:
        short, long = (_factors(fields, name, tensors[name], len(inv_freq)) for name in (SHORT, LONG))
        return long_rope(scale, short, long, magnitude, interleaved)
    if FACTORS in tensors:
        inv_freq = inv_freq / _factors(fields, FACTORS, tensors[FACTORS], len(inv_freq))
    return rope(inv_freq, magnitude, interleaved)


def _factors(fields: Fields, name: str, weight: Weight, pairs: int) -> np.ndarray:
    factors = weight.dequantise() if weight.shape == (pairs,) else np.zeros(1)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise fields.fault(f"tensor {name}", f"must hold {pairs} positive numbers, one per rotary pair")
    return factors.astype(np.float64)
