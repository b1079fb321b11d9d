"""Who guesses what a row will say next. A guess costs nothing but time: what is drawn decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headway.core.step import StepPlan

UNKNOWN = -1  # id of a draft that is promised: it is said when the step that verifies it begins
LONGEST = 7  # drafts of a row: with the token before them, queries for which attention reads a cache once


@dataclass(frozen=True)
class Proposal:
    """What may follow a row's tokens.

    Attributes:
        tokens: ids, in order; `UNKNOWN` each where they are only promised.
        odds: probability that one of them is what is drawn, given that those before it are.
        q: float64 [len(tokens), vocab], the distributions they were drawn from; None = each was certain.
    """

    tokens: tuple[int, ...]
    odds: float
    q: np.ndarray | None = None


class Proposer(Protocol):
    """Proposes for all rows of a step, and learns from what came of it. Used by one thread."""

    def step(self, plan: StepPlan) -> dict[str, Proposal]:
        """A step begins: rows come and go -> by row, the drafts of this step that were only promised."""
        ...

    def reset(self) -> None:
        """All rows are gone."""
        ...

    def propose(self, rows: Iterable[tuple[str, Sequence[int]]], most: int) -> dict[str, Proposal]:
        """Up to `most` tokens for each row, given by its id and all its tokens; rows without an idea are left out."""
        ...
