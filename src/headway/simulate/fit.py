"""Fit the constants of a step-time model to some requests of a measured run.

A request's times are sums of step times. Who was in which step is simulated; with that held still, every step can be
priced anew under other constants at once, and those are found that explain best

    from first to last token     (decoding beside the others)
    from scheduled to first token    (its prompt)
    the moment of both           (how far the whole run had come)

of the sampled requests. Then the run is simulated anew, because who meets whom depends on the constants in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from headway.roofline.collectives import AllReduce
from headway.roofline.robust import descend
from headway.roofline.step import Efficiency, StepTime
from headway.roofline.work import StepWork

# Constant -> how far from its starting value it may well be, as a logarithm.
FREE = {
    "stream": 0.15, "stream_experts": 0.3, "stream_cache": 0.3, "linear": 0.2, "experts": 0.5, "attention": 0.3,
    "prefill_attention": 0.5, "layer": 0.5, "row": 0.7, "eager": 0.5, "step": 0.5,
}  # fmt: skip
LINK = {"floor": 0.7, "bandwidth": 0.5}  # of the all-reduce, where there is one
NOISE = {"decode": 0.01, "prompt": 0.05, "moment": 0.01}  # of a logarithm
TAILS = 9.0  # degrees of freedom of the errors: some requests meet what no model has
ROUNDS = 30


class Spans(msgspec.Struct):
    """What is compared: sums of step times over [begin, end) of the steps, and how long they took.

    Attributes:
        begin, end: step indices. measured: seconds. noise: of the logarithm.
        idle: seconds between steps within the span.
    """

    begin: np.ndarray
    end: np.ndarray
    measured: np.ndarray
    noise: np.ndarray
    idle: np.ndarray


class Constants(msgspec.Struct, frozen=True):
    """Of a step-time model."""

    efficiency: Efficiency
    all_reduce: AllReduce | None

    def names(self, experts: bool) -> dict[str, float]:
        """What may be moved -> how far."""
        routed = ("stream_experts", "experts")
        free = {name: far for name, far in FREE.items() if experts or name not in routed}
        free = {name: far for name, far in free.items() if getattr(self.efficiency, name)}
        return free | (LINK if self.all_reduce is not None else {})

    def moved(self, offsets: Mapping[str, float]) -> Constants:
        """Each times exp(offset). A share may pass 1: a data sheet's clock is not what a card holds."""
        changed: dict[str, Any] = {}
        for name in FREE.keys() & offsets.keys():
            changed[name] = getattr(self.efficiency, name) * float(np.exp(offsets[name]))
        reduce = self.all_reduce
        if reduce is not None:
            changes = {
                name: getattr(reduce, name) * float(np.exp(offsets[name])) for name in LINK.keys() & offsets.keys()
            }
            reduce = msgspec.structs.replace(reduce, **changes)
        return Constants(msgspec.structs.replace(self.efficiency, **changed), reduce)

    def scaled(self, offsets: Mapping[str, float], by: float, like: StepTime) -> dict[str, float]:
        """Offsets under which every part of a step takes exp(by) times as long."""
        rising = ("layer", "row", "eager", "step", "floor")
        names = self.names(like.shape.is_moe)
        return {name: offsets.get(name, 0.0) + (by if name in rising else -by) for name in names}

    def model(self, like: StepTime) -> StepTime:
        """The same model under these constants."""
        return StepTime(
            like.shape, like.hardware, like.layout, math=like.math, efficiency=self.efficiency,
            all_reduce=self.all_reduce, skew=like.skew, amounts=like.amounts,
        )  # fmt: skip


def improved(
    start: Constants, now: Mapping[str, float], like: StepTime, works: Sequence[StepWork], spans: Spans
) -> dict[str, float]:
    """Better offsets of the constants, with the steps held still: the most likely ones, by Gauss-Newton steps."""
    names = start.names(like.shape.is_moe)
    stacked = _stacked(works)
    wide = np.array(list(names.values()))
    at = np.array([now.get(name, 0.0) for name in names])

    def residuals(offsets: np.ndarray) -> np.ndarray:
        model = start.moved(dict(zip(names, offsets, strict=True))).model(like)
        seconds = np.asarray(model.seconds(stacked, model.communication(stacked.tokens)))
        ends = np.concatenate([[0.0], np.cumsum(seconds)])
        took = ends[spans.end] - ends[spans.begin] + spans.idle
        return np.log(spans.measured / took) / spans.noise

    at = descend(residuals, at, wide, tails=TAILS, rounds=ROUNDS, enough=1e-4)
    return dict(zip(names, map(float, at), strict=True))


def _stacked(works: Sequence[StepWork]) -> StepWork:
    """All steps as one whose figures are arrays: the model's formula works on both."""
    columns: dict[str, Any] = {
        name: np.transpose([getattr(work, name) for work in works]).astype(float) for name in StepWork.__struct_fields__
    }
    return StepWork(**columns | {name: tuple(columns[name]) for name in ("bytes", "flops")})
