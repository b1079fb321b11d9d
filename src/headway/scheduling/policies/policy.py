"""What a policy is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headway.scheduling.planning import Step


@dataclass(frozen=True)
class Policy:
    """An order of passes.

    Attributes:
        name: what users call it.
        fill: plans a step by calling passes of `Step`.
        pauses_decode: running decodes may be left out of a step that still has budget.
    """

    name: str
    fill: Callable[[Step], None]
    pauses_decode: bool = False
