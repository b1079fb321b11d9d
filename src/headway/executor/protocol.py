"""Who carries out plans: the real model, the simulator, or a recording. Five methods, and nothing else is shared."""

from __future__ import annotations

from typing import Protocol

from headway.core.step import Capabilities, StepPlan, StepResult

Ticket = int  # the number of the step


class Executor(Protocol):
    """Holds rows and a cache, and computes steps in the order they are submitted. Used by one thread."""

    def capabilities(self) -> Capabilities:
        """What it can hold and do; constant."""
        ...

    def submit(self, plan: StepPlan) -> Ticket:
        """Start a step. Rows in `plan.gone` are dropped first, then blocks copied, then rows created, then computed."""
        ...

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step and take its result. One row's failure is in `failed`, it does not raise."""
        ...

    def reset(self) -> None:
        """Drop all rows and whatever is in progress, in any state: the way out after `submit` or `collect` raised. What
        the cache holds stays; rows that go on come again as `StepPlan.new`, with the blocks they have."""
        ...

    def close(self) -> None:
        """Give everything back; idempotent."""
        ...
