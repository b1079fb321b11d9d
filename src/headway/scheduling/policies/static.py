"""Static batching, as a baseline: the next batch is formed only when every row of the one before has finished."""

from __future__ import annotations

from headway.scheduling.planning import Step
from headway.scheduling.policies.policy import Policy


def fill(step: Step) -> None:
    if not step.running:
        step.admit(whole_batch=True)
    else:
        step.chunks()
    if not step.work:
        step.decodes()


STATIC = Policy("static", fill, pauses_decode=True)
