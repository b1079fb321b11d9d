"""A session stays where it is: consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018). Who has
more than `BOUND` times the mean load is passed over for the next one on the ring."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway.routing.index import BlockIndex
from headway.routing.policies.policy import RoutingPolicy
from headway.routing.replica import ReplicaState
from headway.routing.request import RoutedRequest
from headway.routing.ring import HashRing

BOUND = 1.25


class SessionAffinity(RoutingPolicy):
    def __init__(self) -> None:
        self._ring = HashRing(())

    def choose(
        self, request: RoutedRequest, able: Sequence[ReplicaState], every: Sequence[ReplicaState], index: BlockIndex,
        now: int,
    ) -> ReplicaState:  # fmt: skip
        names = tuple(replica.name for replica in every)
        if names != self._ring.names:
            self._ring = HashRing(names)
        most = math.ceil(BOUND * (1 + sum(replica.load for replica in able)) / len(able))
        fit = {replica.name: replica for replica in able if replica.load < most}
        return next(fit[name] for name in self._ring.walk(request.session or request.id) if name in fit)
