"""Least slack first: prompts in the order in which they would miss their time to first token. What cannot meet it any
more is turned away at once, while others still can. Time per output token is held by the step's budget."""

from __future__ import annotations

from headway.core.clock import to_ps
from headway.scheduling.planning import NO_BLOCKS, PREFIX, Step
from headway.scheduling.policies.policy import Policy
from headway.scheduling.row import Place, Row
from headway.scheduling.state import State

MISSED = "its time to first token cannot be met any more"


def fill(step: Step) -> None:
    _turn_away(step)
    step.decodes()
    step.open()
    partial = [row for row in step.partial if row.place is Place.RUNNING]  # some were preempted
    full = False  # nobody comes in any more
    for row in sorted([*partial, *step.state.queue], key=lambda row: (_slack(step, row), row.order)):
        if step.left <= 0:
            break
        if row.place is Place.RUNNING:
            step.chunk(row)
        elif not full:
            full = step.admit_row(row) not in ("", NO_BLOCKS, PREFIX)
    step.asked()


def _turn_away(step: Step) -> None:
    for row in [row for row in step.state.queue if not row.request.generated and _slack(step, row) < 0]:
        step.state.abort(row, MISSED, step.now)


def _slack(step: Step, row: Row) -> int:
    """ps until its prompt must begin, if nothing else delayed it; of a request without a target, since it came."""
    request, target = row.request, step.state.ttft
    if target is None:
        return request.arrival
    return request.arrival + target - step.now - to_ps(step.seconds_of_prompt(row))


def _nobody_waits(state: State) -> bool:
    """Slack matters to those who wait."""
    return not state.queue


SLO = Policy("slo", fill, predicts=True, timeless=_nobody_waits)
