"""First come, first served, as other engines do it: decodes, prompts in their order of arrival in whatever the step has
left, and whoever fits comes in. Nobody passes a long prompt, and a full cache takes blocks back again and again."""

from __future__ import annotations

from headway.scheduling.planning import Step
from headway.scheduling.policies.policy import Policy


def fill(step: Step) -> None:
    step.decodes()
    step.chunks()
    step.admit()
    step.asked()


FCFS = Policy("fcfs", fill, headroom=False, strict_after=None)
