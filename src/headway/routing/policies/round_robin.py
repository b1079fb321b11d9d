"""In turn; one that cannot is passed over."""

from __future__ import annotations

from collections.abc import Sequence

from headway.routing.index import BlockIndex
from headway.routing.policies.policy import RoutingPolicy
from headway.routing.replica import ReplicaState
from headway.routing.request import RoutedRequest


class RoundRobin(RoutingPolicy):
    def __init__(self) -> None:
        self._last = -1  # number of the replica that took the latest request

    def choose(
        self, request: RoutedRequest, able: Sequence[ReplicaState], every: Sequence[ReplicaState], index: BlockIndex,
        now: int,
    ) -> ReplicaState:  # fmt: skip
        ahead = [replica for replica in able if replica.number > self._last]
        chosen = min(ahead or able, key=lambda replica: replica.number)
        self._last = chosen.number
        return chosen
