"""Step times from a handful of constants: what an engine predicts by that knows its machine only from its first steps.

seconds = step + row * rows + token * new tokens + kv_token * cached tokens read + pair * pairs of query and key
"""

from __future__ import annotations

import msgspec

from headway.core.receipts import StepParts
from headway.core.step import StepShape


class FixedCosts(msgspec.Struct, frozen=True):
    """The simplest step-time model: seconds per step, per row, per new token, per cached token read, per pair of query
    and key."""

    step: float = 0.0
    row: float = 0.0
    token: float = 0.0
    kv_token: float = 0.0
    pair: float = 0.0

    def predict(self, shape: StepShape) -> float:
        work = self.step + self.row * shape.rows + self.token * shape.tokens
        return work + self.kv_token * sum(shape.kv_tokens) + self.pair * sum(shape.pairs)

    def parts(self, shape: StepShape) -> StepParts:
        """The step by what it grows with."""
        groups = len(shape.kv_tokens)
        keys, pairs = (self.kv_token,) * groups, (self.pair,) * groups
        return StepParts(self.step, self.row, self.token, 0.0, (self.kv_token + self.pair,) * groups, keys, pairs)
