"""What speculative decoding is worth: expected tokens per target step, and when the batch makes it a loss (A6, B11)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headway.core.errors import BadInput
from headway.core.step import StepShape
from headway.roofline.step import StepTime, decode_step
from headway.shape.model import ModelShape


class Draft(msgspec.Struct, frozen=True):
    """How well drafts are accepted, and what one drafted token costs.

    Attributes:
        acceptance: probability that one drafted token is accepted, for the formula; ignored if there is a curve.
        cost: seconds of one draft step over one target step (c).
        curve: measured mean tokens per target step by draft length, `curve[k - 1]` for k drafted tokens.
    """

    acceptance: float = 0.8
    cost: float = 0.05
    curve: tuple[float, ...] = ()


def expected_tokens(k: int, acceptance: float) -> float:
    """(1 - a^(k+1)) / (1 - a): tokens emitted per target step when each of k drafts is accepted with probability a."""
    if k < 0:
        raise BadInput("--draft-tokens", f"{k}; accepted: a whole number from 0")
    if not 0 <= acceptance <= 1:
        raise BadInput("--acceptance", f"{acceptance}; accepted: from 0 to 1")
    return k + 1.0 if acceptance == 1 else (1.0 - acceptance ** (k + 1)) / (1.0 - acceptance)


def tokens_per_step(draft: Draft, k: int) -> float:
    """From the measured curve where there is one, else from the acceptance rate. A curve is not extrapolated: beyond
    its end further drafts are worth nothing."""
    if k == 0:
        return 1.0
    if draft.curve:
        return draft.curve[min(k, len(draft.curve)) - 1]
    return expected_tokens(k, draft.acceptance)


def speedup(draft: Draft, k: int, verify: float = 1.0) -> float:
    """Tokens per target step over its relative time: E / (verify + k*c). `verify`: a step over k+1 positions relative
    to a plain step; 1 while decode is memory-bound, more once arithmetic counts."""
    return tokens_per_step(draft, k) / (verify + k * draft.cost)


def best_length(draft: Draft, longest: int, verify: Sequence[float] | None = None) -> tuple[int, float]:
    """(k, speedup) of the best draft length from 0 to `longest`; (0, 1.0) when speculation does not pay."""
    costs = verify if verify is not None else [1.0] * (longest + 1)
    return max(((k, speedup(draft, k, costs[k])) for k in range(longest + 1)), key=lambda pair: pair[1])


def verify_step(shape: ModelShape, batch: float, context: float, k: int) -> StepShape:
    """A step that verifies k drafts per row: k+1 positions each, the cache read once per row."""
    return decode_step(shape, batch, context).verifying(batch * k, batch)


def verify_costs(model: StepTime, batch: float, context: float, longest: int) -> list[float]:
    """Time of verifying k drafts relative to a plain decode step, k = 0..longest, at this batch and context: near 1
    while memory-bound, k+1 when compute-bound; a mixture's experts touched grow with the positions."""
    plain = model.predict(decode_step(model.shape, batch, context))
    return [model.predict(verify_step(model.shape, batch, context, k)) / plain for k in range(longest + 1)]
