"""By class, then by arrival. A better class takes the place of running requests of a worse one, the last ones first."""

from __future__ import annotations

from headway.scheduling.planning import Step
from headway.scheduling.policies.policy import Policy


def fill(step: Step) -> None:
    step.make_room()
    step.decodes()
    step.chunks()
    step.admit()
    step.asked()


PRIORITY = Policy("priority", fill)
