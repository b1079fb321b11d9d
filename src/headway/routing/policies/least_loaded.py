"""Fewest requests in hand."""

from __future__ import annotations

from collections.abc import Sequence

from headway.routing.index import BlockIndex
from headway.routing.policies.policy import RoutingPolicy, least
from headway.routing.replica import ReplicaState
from headway.routing.request import RoutedRequest


class LeastLoaded(RoutingPolicy):
    def choose(
        self, request: RoutedRequest, able: Sequence[ReplicaState], every: Sequence[ReplicaState], index: BlockIndex,
        now: int,
    ) -> ReplicaState:  # fmt: skip
        return least(able)
