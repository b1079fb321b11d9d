"""Named policies: in which order the passes of a step run."""

from __future__ import annotations

from headway.core.errors import BadInput
from headway.scheduling.policies.chunked import CHUNKED
from headway.scheduling.policies.fair import FAIR
from headway.scheduling.policies.fcfs import FCFS
from headway.scheduling.policies.policy import Policy
from headway.scheduling.policies.prefill_first import PREFILL_FIRST
from headway.scheduling.policies.priority import PRIORITY
from headway.scheduling.policies.slo import SLO
from headway.scheduling.policies.static import STATIC

POLICIES = {policy.name: policy for policy in (CHUNKED, PREFILL_FIRST, STATIC, FCFS, PRIORITY, FAIR, SLO)}


def policy_named(name: str) -> Policy:
    """The policy of that name. BadInput if there is none."""
    if name not in POLICIES:
        raise BadInput("policy", f"{name!r} is not one of {', '.join(POLICIES)}")
    return POLICIES[name]
