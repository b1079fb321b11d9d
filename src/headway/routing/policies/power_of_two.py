"""The less loaded of two drawn ones (Mitzenmacher 2001). Drawn by a hash of the request's id: no generator, and the
same decisions in every replay."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from headway.routing.index import BlockIndex
from headway.routing.policies.policy import RoutingPolicy, least
from headway.routing.replica import ReplicaState
from headway.routing.request import RoutedRequest


class PowerOfTwo(RoutingPolicy):
    def choose(
        self, request: RoutedRequest, able: Sequence[ReplicaState], every: Sequence[ReplicaState], index: BlockIndex,
        now: int,
    ) -> ReplicaState:  # fmt: skip
        count = len(able)
        drawn = int.from_bytes(blake2b(request.id.encode(), digest_size=8).digest(), "little")
        one, further = drawn % count, 1 + drawn // count % max(1, count - 1)
        return least([able[one], able[(one + further) % count]])
