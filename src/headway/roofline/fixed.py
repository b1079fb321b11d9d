"""Step times from a handful of constants: what an engine predicts by that knows its machine only from its first steps.

seconds = step + row * rows + token * new tokens + logit * positions with logits
        + kv_token * cached tokens read + pair * pairs of query and key, and what few tokens take beyond that line
"""

from __future__ import annotations

import msgspec

from headway.core.receipts import StepParts
from headway.core.step import StepShape


class FixedCosts(msgspec.Struct, frozen=True):
    """The simplest step-time model: seconds per step, per row, per new token, per cached token read, per pair of query
    and key, per position whose logits are computed.

    Attributes:
        bends: (new tokens, seconds beyond the line) in order: kernels take a few rows at a time, so that a fifth token
            can cost more than the fourth. Lines between them; nothing at one token, nor from twice the last on.
    """

    step: float = 0.0
    row: float = 0.0
    token: float = 0.0
    kv_token: float = 0.0
    pair: float = 0.0
    logit: float = 0.0
    bends: tuple[tuple[int, float], ...] = ()

    def predict(self, shape: StepShape) -> float:
        work = self.step + self.row * shape.rows + self.token * shape.tokens + self.logit * shape.logit_rows
        if self.bends and shape.tokens < 2 * self.bends[-1][0]:
            work += self._bend(shape.tokens)
        return work + self.kv_token * sum(shape.kv_tokens) + self.pair * sum(shape.pairs)

    def _bend(self, tokens: float) -> float:
        """Seconds beyond the line."""
        before, seconds = 1, 0.0
        for after, more in (*self.bends, (2 * self.bends[-1][0], 0.0)):
            if tokens <= after:
                return seconds + (more - seconds) * max(0.0, tokens - before) / (after - before)
            before, seconds = after, more
        return 0.0

    def parts(self, shape: StepShape) -> StepParts:
        """The step by what it grows with."""
        groups = len(shape.kv_tokens)
        decode, keys, pairs = ((each,) * groups for each in (self.kv_token + self.pair, self.kv_token, self.pair))
        return StepParts(self.step, self.row, self.token, self.logit, decode, keys, pairs)
