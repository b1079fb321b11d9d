"""An executor for the engine's loop that computes nothing: one simulated rank, and what its rows say."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from headway.core.step import Capabilities, RowInit, StepPlan, StepResult
from headway.executor.simulated import SimulatedRanks


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
    """One rank, as the engine's loop drives it. Arguments as of `SimulatedRanks`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._rank = SimulatedRanks(*args, **options)

    def capabilities(self) -> Capabilities:
        return self._rank.limits

    def submit(self, plan: StepPlan) -> int:
        self._rank.submit([plan])
        return plan.step

    def collect(self, ticket: int) -> StepResult:
        (result,) = self._rank.collect()
        assert result.step == ticket, "steps are collected in the order they were submitted"
        return result

    def reset(self) -> None:
        self._rank.reset()

    def close(self) -> None:
        self.reset()
