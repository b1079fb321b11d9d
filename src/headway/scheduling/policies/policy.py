"""What a policy is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headway.scheduling.planning import Step
from headway.scheduling.row import STRICT_AFTER
from headway.scheduling.state import State


def always(state: State) -> bool:
    """Whatever waits and runs."""
    return True


@dataclass(frozen=True)
class Policy:
    """An order of passes.

    Attributes:
        name: what users call it.
        fill: plans a step by calling passes of `Step`.
        pauses_decode: running decodes may be left out of a step that still has budget.
        headroom: nobody is admitted unless every running row could have one more block.
        predicts: it needs the step-time model.
        timeless: whether its next plans depend neither on the time nor on what earlier plans cost, as long as nothing
            arrives or ends; then equal steps may be leapt over.
        strict_after: preemptions after which a request is only admitted with its worst case reserved; None = never.
    """

    name: str
    fill: Callable[[Step], None]
    pauses_decode: bool = False
    headroom: bool = True
    predicts: bool = False
    timeless: Callable[[State], bool] = always
    strict_after: int | None = STRICT_AFTER
