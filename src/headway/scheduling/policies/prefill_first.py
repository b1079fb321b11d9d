"""Prompts first: while there is any prompt to compute, decodes pause. Shortest time to first token, worst stalls."""

from __future__ import annotations

from headway.scheduling.planning import Step
from headway.scheduling.policies.policy import Policy


def fill(step: Step) -> None:
    step.chunks()
    step.admit()
    if not step.work:
        step.decodes()


PREFILL_FIRST = Policy("prefill-first", fill, pauses_decode=True)
