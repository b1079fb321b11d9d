"""An executor that computes nothing and takes the time a step-time model says. The scheduler cannot tell."""

from __future__ import annotations

from hashlib import blake2b
from typing import Protocol

import msgspec

from headway.core.clock import VirtualClock, to_ps
from headway.core.step import Capabilities, RowInit, Seconds, StepPlan, StepResult, StepShape, Work
from headway.scheduling.budget import StepTimeModel
from headway.scheduling.shape import shape_of


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


class TokenSource(Protocol):
    """What rows emit in a simulation."""

    def token(self, row: RowInit, position: int) -> int:
        """The token of a request at a position of its sequence; the same whenever it is asked."""
        ...


class HashedTokens:
    """A seeded hash of (request, position): reproducible, and never a stop id, so lengths are the workload's alone."""

    def __init__(self, seed: int, vocab: int) -> None:
        self._seed = seed
        self._vocab = vocab

    def token(self, row: RowInit, position: int) -> int:
        attempt = 0
        while (token := self._draw(row.id, position, attempt)) in row.stop_ids:
            attempt += 1
        return token

    def _draw(self, id: str, position: int, attempt: int) -> int:
        text = f"{self._seed}/{position}/{attempt}/{id}".encode()
        return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") % self._vocab


class SimulatedExecutor:
    """Plays steps in virtual time.

    Args:
        limits: what it pretends to hold.
        clock: moved forward to the end of a step when it is collected.
        model: how long steps take.
        tokens: what rows emit. A draft is accepted while it equals what the source says, as a real model would.
        host: seconds per step outside of the model (scheduling, building inputs, detokenising): measure them, for
            leaving them out makes every latency too good.
    """

    def __init__(
        self,
        limits: Capabilities,
        clock: VirtualClock,
        model: StepTimeModel,
        tokens: TokenSource,
        host: float = 0.0,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._model = model
        self._tokens = tokens
        self._host = host
        self._rows: dict[str, RowInit] = {}
        self._done: dict[int, tuple[int, StepResult]] = {}  # step -> (when it is ready, result)
        self._ready = 0  # when the last one is

    def capabilities(self) -> Capabilities:
        return self._limits

    def submit(self, plan: StepPlan) -> int:
        for id in plan.gone:
            del self._rows[id]
        for row in plan.new:
            self._rows[row.id] = row
        forward = self._model.predict(shape_of(plan, self._limits.windows)) if plan.work else 0.0
        seconds = Seconds(forward=forward, host=self._host)
        tokens = {work.id: self._emit(work) for work in plan.work if work.sample}
        self._ready = max(self._ready, self._clock.now()) + to_ps(seconds.total)
        self._done[plan.step] = (self._ready, StepResult(plan.step, tokens, seconds=seconds))
        return plan.step

    def collect(self, ticket: int) -> StepResult:
        ready, result = self._done.pop(ticket)
        self._clock.advance_to(ready)
        return result

    def reset(self) -> None:
        self._rows.clear()
        self._done.clear()

    def close(self) -> None:
        self.reset()

    def _emit(self, work: Work) -> tuple[int, ...]:
        """Accepted drafts, then the first token that differs from its draft, or the one after all of them."""
        row = self._rows[work.id]
        position = work.start + work.count - len(work.draft)
        emitted: list[int] = []
        for draft in (*work.draft, None):
            emitted.append(self._tokens.token(row, position + len(emitted)))
            if emitted[-1] != draft:
                break
        return tuple(emitted)
