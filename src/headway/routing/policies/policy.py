"""What a routing policy is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from headway.routing.index import BlockIndex
from headway.routing.replica import ReplicaState
from headway.routing.request import RoutedRequest


class RoutingPolicy(Protocol):
    """Chooses among replicas. What it remembers of its choices is its own.

    Attributes:
        reads_blocks: it looks at the names of prompts' blocks.
    """

    reads_blocks: ClassVar[bool] = False

    def choose(
        self, request: RoutedRequest, able: Sequence[ReplicaState], every: Sequence[ReplicaState], index: BlockIndex,
        now: int,
    ) -> ReplicaState:  # fmt: skip
        """One of `able`: at least one replica with room that has not failed the request. `every`: all there are, in a
        fixed order."""
        ...


def least(replicas: Sequence[ReplicaState]) -> ReplicaState:
    """The one with the fewest requests, the first of several."""
    return min(replicas, key=lambda replica: replica.load)
