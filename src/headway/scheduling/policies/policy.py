"""What a policy is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headway.scheduling.planning import Step
from headway.scheduling.row import STRICT_AFTER


@dataclass(frozen=True)
class Policy:
    """An order of passes.

    Attributes:
        name: what users call it.
        fill: plans a step by calling passes of `Step`.
        pauses_decode: running decodes may be left out of a step that still has budget.
        headroom: nobody is admitted unless every running row could have one more block.
        predicts: it needs the step-time model.
        timeless: its plans do not depend on the time, or on what earlier plans cost; so equal steps may be leapt over.
        strict_after: preemptions after which a request is only admitted with its worst case reserved; None = never.
    """

    name: str
    fill: Callable[[Step], None]
    pauses_decode: bool = False
    headroom: bool = True
    predicts: bool = False
    timeless: bool = True
    strict_after: int | None = STRICT_AFTER
