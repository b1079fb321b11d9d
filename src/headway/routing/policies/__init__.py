"""Named routing policies: which of the replicas with room takes a request."""

from __future__ import annotations

from headway.core.errors import BadInput
from headway.routing.policies.least_loaded import LeastLoaded
from headway.routing.policies.policy import RoutingPolicy
from headway.routing.policies.power_of_two import PowerOfTwo
from headway.routing.policies.prefix import PrefixAware
from headway.routing.policies.round_robin import RoundRobin
from headway.routing.policies.session import SessionAffinity

ROUTING: dict[str, type[RoutingPolicy]] = {
    "prefix": PrefixAware, "session": SessionAffinity, "least-loaded": LeastLoaded, "round-robin": RoundRobin,
    "power-of-two": PowerOfTwo,
}  # fmt: skip


def routing_named(name: str, field: str = "--policy") -> RoutingPolicy:
    """A fresh policy of that name.

    Raises:
        BadInput: there is none.
    """
    if name not in ROUTING:
        raise BadInput(field, f"{name!r} is not one of {', '.join(ROUTING)}")
    return ROUTING[name]()
