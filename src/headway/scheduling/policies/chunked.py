"""The default: every decode in every step, and prompts in chunks beside them, short ones first, none for ever last."""

from __future__ import annotations

from headway.scheduling.planning import Step
from headway.scheduling.policies.policy import Policy
from headway.scheduling.prompts import prompts


def fill(step: Step) -> None:
    step.decodes()
    prompts(step)


CHUNKED = Policy("chunked", fill)
