"""Prefill and decode pools: who computes the prompt of a request that another replica answers.

    RequestRouter    places a request at a replica of the decode pool       (as without pools)
    PrefillReplicas      says who computes its prompt: one of the prefill pool, or nobody but that replica itself

The HTTP proxy and the simulator ask the same one.
"""

from __future__ import annotations

from headway.core.errors import Rejected
from headway.routing.policies.policy import RoutingPolicy
from headway.routing.replica import ReplicaState
from headway.routing.request import RoutedRequest
from headway.routing.router import HEARTBEAT, RequestRouter

LEAST_TOKENS = 256  # of a prompt that are to be computed: fewer take little time beside decodes


class PrefillReplicas:
    """The replicas that compute prompts for others.

    Args:
        policy: who is chosen among them.
        least: tokens of a prompt, beside those cached where it is answered, from which it is sent there.

    Attributes:
        router: of these replicas, by the same rules: what they have in hand, and what is cached where.
    """

    def __init__(
        self, policy: RoutingPolicy, least: int = LEAST_TOKENS, *, heartbeat: int | None = HEARTBEAT
    ) -> None:  # fmt: skip
        self.router = RequestRouter(policy, heartbeat=heartbeat)
        self._least = least

    def assign(self, request: RoutedRequest, now: int) -> ReplicaState | None:
        """Who computes the prompt of a request that was just placed; None: the one that answers it. What waits for
        room in the prefill pool would wait longer than it takes to compute, so nothing does."""
        if not request.splits or request.tokens - request.cached < self._least or request.id in self.router.live:
            return None
        if not any(replica.has_room for replica in self.router.replicas.values()):
            return None
        half = RoutedRequest(request.id, request.tokens, request.names, request.block_tokens, request.session)
        try:
            self.router.offer(half)
        except Rejected:
            return None
        placed = self.router.dispatch(now)
        if not placed:
            self.router.end(half.id, now)
            return None
        return placed[0].replica

    def computed(self, id: str, now: int) -> None:
        """The prompt of a request is computed there."""
        if id in self.router.live:
            self.router.begin(id, now)
            self.router.end(id, now)

    def release(self, id: str, now: int) -> None:
        """It is not, and will not be. Idempotent."""
        self.router.end(id, now)
