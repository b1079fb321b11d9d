"""Many equal decode steps committed at once, for a simulator that need not look at each of them.

`apply_run` leaves exactly what the same steps leave one by one: block ids, names, order of release. It walks only the
moments at which a row crosses a block boundary or leaves a block behind its window: O(rows + blocks), not O(tokens).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headway.core.events import FirstToken, StepDone
from headway.core.step import Seconds
from headway.scheduling.commit import accept, settle
from headway.scheduling.flight import Flight
from headway.scheduling.planning import BY_POLICY, NO_BLOCKS, NO_ROWS
from headway.scheduling.row import Row
from headway.scheduling.state import Emission, State

MOST_STEPS = 1 << 20


def horizon(state: State, flight: Flight, blocked: str, most: int = MOST_STEPS) -> int:
    """For how many steps, the one in flight included and `most` in all, plans keep their shape: the same rows, one new
    token each.

    1 (nothing is promised) if any row computes more than one token or is new (others may wait for another reason in the
    next step), or a waiting request might come in by itself: for blocks that fall
    behind a window, or that it turns out to share.
    """
    waits = ("", NO_ROWS, BY_POLICY, NO_BLOCKS) if _settled(state) else ("", NO_ROWS, BY_POLICY)
    steady = flight.rows == state.running and blocked in waits
    steady = steady and not flight.plan.new and not any(row.forks for row in flight.rows)
    if not (steady and flight.rows and all(one.count == 1 and one.sample for one in flight.plan.work)):
        return 1
    longest = min(most, min([row.request.max_len - len(row.request.tokens) for row in flight.rows]))
    if state.limits.long_after is not None:
        short = [len(row.request.tokens) for row in flight.rows if not row.table.long]
        longest = min([longest, *(state.limits.long_after + 1 - tokens for tokens in short)])
    return _within_blocks(state, flight.rows, longest)


def _settled(state: State) -> bool:
    """Blocks come back with the end of a row only, and are only counted."""
    return not state.cache.reuse and not state.cache.windowed


def _within_blocks(state: State, rows: Sequence[Row], steps: int) -> int:
    """The most steps, up to `steps`, for which the blocks available now suffice."""
    size = state.cache.block_size
    available = min([pool.available for pool in state.cache.pools])
    if len(rows) * (1 + steps // size) <= available:  # whatever they still have room for
        return steps
    spare = [row.table.capacity - row.request.computed for row in rows]  # steps until the next block

    def enough(steps: int) -> bool:
        return sum([-(-max(0, steps - left) // size) for left in spare]) <= available

    if enough(steps):
        return steps
    fits, too_many = 1, steps + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if enough(middle):
            fits = middle
        else:
            too_many = middle
    return fits


def apply_run(
    state: State, flight: Flight, tokens: Mapping[str, Sequence[int]], times: Sequence[int], seconds: Seconds
) -> None:
    """Commit `len(times)` steps of which the first was in flight. The caller checked `horizon`, and with `check`."""
    steps = len(times)
    starts = [row.request.computed for row in flight.rows]
    for row in flight.rows:
        row.request.pending -= 1
    fresh = [row for row in flight.rows if not row.request.generated]
    for row in flight.rows:
        row.request.tokens.extend(tokens[row.request.id][:-1])
    if _settled(state):
        for row, start in zip(flight.rows, starts, strict=True):
            row.table.grow(start + steps)
    else:
        _walk(state, flight, starts, times)
    if state.log:
        for row in fresh:
            waited = times[0] - row.request.arrival
            state.log.append(FirstToken(now=times[0], id=row.request.id, waited=waited))
    for row, work in zip(flight.rows, flight.plan.work, strict=True):
        emitted = tuple(tokens[work.id])
        _, finish = accept(row.request, emitted[-1:])
        settle(state, row, finish, times[-1])
        state.emissions.append(Emission(row.request, emitted, finish))
    state.land(flight, times[-1])
    if state.log:
        state.log.append(_run_done(flight, times, seconds))


def _walk(state: State, flight: Flight, starts: Sequence[int], times: Sequence[int]) -> None:
    """Seal, trim and take blocks at the moments at which single steps do."""
    steps = len(times)
    due = _boundaries(state, flight.rows, starts, steps)
    for step in sorted(due):
        if step == steps:
            break
        if step > 1:
            state.cache.expire(times[step - 2])  # a name that expired since the last of these steps is free again
        now = times[step - 1]
        for index in due[step]:
            row = flight.rows[index]
            row.request.computed = starts[index] + step
            settle(state, row, None, now)
        state.cache.expire(now)  # here the next step is planned
        for index in due[step]:
            flight.rows[index].table.grow(starts[index] + step + 1)
    if steps > 1:
        state.cache.expire(times[-2])


def _boundaries(state: State, rows: Sequence[Row], starts: Sequence[int], steps: int) -> dict[int, list[int]]:
    """Step -> indices of the rows whose table changes when that step is committed, in order of rows: a block is full,
    or one falls behind a window."""
    size = state.cache.block_size
    phases = sorted({0, *((window - 1) % size for window in state.cache.windows if window is not None)})
    due: dict[int, list[int]] = {}
    for index in range(len(rows)):
        changes = {step for phase in phases for step in range((phase - starts[index] - 1) % size + 1, steps + 1, size)}
        for step in changes:
            due.setdefault(step, []).append(index)
    return due


def check(state: State, flight: Flight, tokens: Mapping[str, Sequence[int]], times: Sequence[int]) -> None:
    """ValueError if the run does not stop where a row ends or a deadline passes, or a row ended meanwhile."""
    deadline = state.next_deadline()
    if len(times) > 1 and deadline is not None and deadline <= times[-2]:
        raise ValueError("the run passes a deadline")
    for row in flight.rows:
        request, emitted = row.request, tokens[row.request.id]
        if request.finish is not None:
            raise ValueError(f"{request.id} ended meanwhile; commit a single step")
        if len(emitted) != len(times):
            raise ValueError(f"{request.id}: {len(emitted)} tokens for {len(times)} steps")
        honoured = emitted[max(0, request.params.min_tokens - request.generated) : -1]
        if not request.stop_ids.isdisjoint(honoured):
            raise ValueError(f"{request.id} meets a stop id before the last step of the run")


def _run_done(flight: Flight, times: Sequence[int], seconds: Seconds) -> StepDone:
    assert flight.shape is not None, "a log wants shapes"
    per_row = (len(times),) * len(flight.rows)
    return StepDone(
        now=times[-1],
        step=flight.plan.step,
        steps=len(times),
        planned=flight.planned,
        idle=flight.idle,
        rows=tuple([row.number for row in flight.rows]),
        counts=per_row,
        emitted=per_row,
        shape=flight.shape,
        predicted=None if flight.plan.predicted is None else len(times) * flight.plan.predicted,
        seconds=seconds,
        times=tuple(times),
    )
