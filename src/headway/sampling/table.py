"""Draws as arrays: the parameters of many rows side by side, so that one call draws for all of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from headway.core.request import SamplingParams

NOT_FINITE, NOTHING_ALLOWED = -1, -2  # instead of a token
SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)  # a lower one gives the same weights: 1 at the maximum, else 0

_MOST = 2**31 - 1


def failure(code: int, position: int) -> str:
    """Why there is no token, for the user."""
    if code == NOTHING_ALLOWED:
        return f"no token is allowed at position {position}: every logit is minus infinity"
    return f"the model's logits at position {position} are not finite; is the checkpoint damaged?"


class DrawTable:
    """Parameters by slot; each live row has one.

    Attributes:
        params: the parameters as they were given; None for a free slot.
        temperature: float32 [slots]; 0 = the likeliest token, by lowest id.
        top_k: int32 [slots], 0 = off.
        top_p: float64 [slots], 1 = off.
        min_p: float32 [slots], 0 = off.
        seed: uint64 [slots].
        choice: int32 [slots].
    """

    def __init__(self, slots: int) -> None:
        self.params: list[SamplingParams | None] = [None] * slots
        self.temperature = np.zeros(slots, np.float32)
        self.top_k = np.zeros(slots, np.int32)
        self.top_p = np.ones(slots, np.float64)
        self.min_p = np.zeros(slots, np.float32)
        self.seed = np.zeros(slots, np.uint64)
        self.choice = np.zeros(slots, np.int32)

    def set(self, slot: int, params: SamplingParams, choice: int) -> None:
        """Take a slot over; the seed must be set."""
        assert params.seed is not None, "it is set when a request is admitted"
        self.params[slot] = params
        self.temperature[slot] = 0.0 if params.greedy else max(params.temperature, SMALLEST_TEMPERATURE)
        self.top_k[slot] = min(params.top_k, _MOST)
        self.top_p[slot] = params.top_p or sys.float_info.min  # a mass that the likeliest token reaches alone
        self.min_p[slot] = params.min_p
        self.seed[slot] = params.seed % 2**64
        self.choice[slot] = choice


@dataclass(frozen=True)
class Draws:
    """One draw per entry.

    Attributes:
        table: where the parameters are.
        slots: int32 [draws], whose.
        rows: int32 [draws], from which row of the logits.
        positions: int32 [draws], index within its sequence of the token to draw.
    """

    table: DrawTable
    slots: np.ndarray
    rows: np.ndarray
    positions: np.ndarray

    def __len__(self) -> int:
        return len(self.slots)
