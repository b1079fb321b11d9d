"""Tenants get equal shares of the machine's time, in predicted seconds: a token of a long context costs more than one
of a short one. The tenant that had least goes first, by arrival within it; who was away comes back without credit."""

from __future__ import annotations

from collections import deque

from headway.scheduling.planning import PREFIX, Step
from headway.scheduling.policies.policy import Policy
from headway.scheduling.row import Place, Row
from headway.scheduling.state import State


def fill(step: Step) -> None:
    accounts = step.state.accounts
    step.decodes()
    step.open()
    partial = [row for row in step.partial if row.place is Place.RUNNING]  # some were preempted
    lines: dict[str, deque[Row]] = {}
    for row in (*partial, *step.state.queue):
        lines.setdefault(row.request.tenant, deque()).append(row)
    _forget_credit(accounts, {*lines, *(row.request.tenant for row in step.state.running)})
    for tenant, seconds in step.seconds_by_tenant().items():
        accounts[tenant] += seconds
    while lines and step.left > 0:
        tenant = min(lines, key=lambda name: accounts[name])
        row = lines[tenant].popleft()
        before = len(step.work)
        reason = ""
        if row.place is Place.RUNNING:
            step.chunk(row)
        else:
            reason = step.admit_row(row)
        if len(step.work) > before:
            accounts[tenant] += step.seconds_of(step.work[-1])
        if reason not in ("", PREFIX) or not lines[tenant]:
            del lines[tenant]
    step.asked()


def _forget_credit(accounts: dict[str, float], active: set[str]) -> None:
    """Tenants that come back, or come for the first time, start level with the one that had least. An account is only
    ever compared with others: that of the only tenant begins anew."""
    known = [seconds for name, seconds in accounts.items() if name in active]
    level = min(known) if len(known) > 1 else 0.0
    for name in accounts.keys() - active:
        del accounts[name]
    for name in active if len(known) == 1 else active - accounts.keys():
        accounts[name] = level


def _one_tenant(state: State) -> bool:
    """Accounts matter between tenants."""
    return not state.queue and len({row.request.tenant for row in state.running}) == 1


FAIR = Policy("fair", fill, predicts=True, timeless=_one_tenant)
