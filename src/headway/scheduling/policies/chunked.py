"""The default: every decode in every step, and prompts in chunks beside them."""

from __future__ import annotations

from headway.scheduling.planning import Step
from headway.scheduling.policies.policy import Policy


def fill(step: Step) -> None:
    step.decodes()
    step.chunks()
    step.admit()


CHUNKED = Policy("chunked", fill)
