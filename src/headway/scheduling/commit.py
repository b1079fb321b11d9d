"""A step's result applied: the only place where `tokens` grow and where `computed` moves forward."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.events import FirstToken, StepDone
from headway.core.request import Finish, Request
from headway.core.step import StepPlan, StepResult, StepShape, Work
from headway.scheduling.row import Row
from headway.scheduling.state import Output, State


class Flight:
    """A plan that was handed out and whose result is not committed yet.

    Attributes:
        plan: what the executor works on.
        rows: the row of each Work, in order.
        planned: when, ps.
        idle: ps since the step before was committed.
        shape: size of the step, if anyone wants to know.
    """

    __slots__ = ("idle", "plan", "planned", "rows", "shape")

    def __init__(self, plan: StepPlan, rows: list[Row], planned: int, idle: int, shape: StepShape | None) -> None:
        self.plan = plan
        self.rows = rows
        self.planned = planned
        self.idle = idle
        self.shape = shape


def apply(state: State, flight: Flight, result: StepResult, now: int) -> None:
    """Move every row of the step forward by what was computed and emitted; finish, seal and trim.

    Fills `state.outputs` with one entry per row that emitted tokens or ended.
    """
    emitted_counts = []
    for row, work in zip(flight.rows, flight.plan.work, strict=True):
        request = row.request
        emitted: tuple[int, ...] = ()
        finish = _ended_outside(row, work, result)
        if finish is None:
            if work.sample:
                first = not request.generated
                emitted, finish = accept(request, result.tokens[work.id])
                if first and state.log:
                    state.log.append(FirstToken(now=now, id=work.id, waited=now - request.arrival))
                if finish is None and result.drafts:
                    propose(request, result.drafts.get(work.id, ()))
            else:
                request.computed = work.start + work.count
            if finish is None or finish.reason == "length":  # a stop string in the very last token is a stop
                finish = result.finish.get(work.id, finish)
        emitted_counts.append(len(emitted))
        settle(state, row, finish, now)
        if emitted or finish is not None:
            state.outputs.append(Output(request, emitted, finish))
    for row in [row for row in state.running if row.cancelled]:  # held by the executor, but not part of this step
        state.abort(row, None, now)
    if state.log:
        state.log.append(step_done(flight, result, emitted_counts, now))


def _ended_outside(row: Row, work: Work, result: StepResult) -> Finish | None:
    """Why nothing of this step counts for the row: it failed, or was cancelled meanwhile."""
    if row.cancelled:
        return Finish("abort")
    if result.failed and work.id in result.failed:
        return Finish("error", result.failed[work.id])
    emitted = len(result.tokens.get(work.id, ()))
    if emitted == 0 and work.sample:
        return Finish("error", "the executor returned no token for this row")
    if emitted > 1 + len(work.draft):
        return Finish("error", f"the executor returned {emitted} tokens for {len(work.draft)} drafts")
    return None


def settle(state: State, row: Row, finish: Finish | None, now: int) -> None:
    """What follows from a row's new `computed`: full blocks get their names; then the row ends, or lets go of what is
    behind its windows and of the choices that waited for its prompt."""
    request, table = row.request, row.table
    if request.computed // state.cache.block_size > table.sealed:
        table.seal(request.tokens, request.computed)
    if finish is not None:
        state.finish(row, finish, now)
        return
    if state.cache.windowed:
        table.trim(request.computed, now)
    if state.forking and request.computed >= request.prompt_len:
        state.release_forks(request.id)


def accept(request: Request, emitted: Sequence[int]) -> tuple[tuple[int, ...], Finish | None]:
    """Append what was emitted (accepted drafts, then one drawn token) up to the first that ends the request.

    Rejected drafts are rolled back: their positions do not count as computed. -> tokens appended, why it ended.
    """
    known = len(request.tokens)
    accepted = len(emitted) - 1
    request.draft = []
    finish = None
    for token in emitted:
        honoured = request.generated >= request.params.min_tokens
        request.tokens.append(token)
        if token in request.stop_ids and honoured:
            finish = Finish("stop", token)
            break
        if len(request.tokens) >= request.max_len:
            finish = Finish("length")
            break
    kept = len(request.tokens) - known
    request.computed = known + min(accepted, kept)
    return tuple(emitted[:kept]), finish


def propose(request: Request, drafts: Sequence[int]) -> None:
    """Note drafts for the next step; not more than could still be accepted before the drawn token reaches max_len."""
    request.draft = list(drafts[: request.max_len - len(request.tokens) - 1])


def step_done(flight: Flight, result: StepResult, emitted: Sequence[int], now: int) -> StepDone:
    """The step as an event."""
    assert flight.shape is not None, "a log wants shapes"
    work = flight.plan.work
    drafted = sum(len(one.draft) for one in work)
    return StepDone(
        now=now,
        step=flight.plan.step,
        planned=flight.planned,
        idle=flight.idle,
        rows=tuple([row.number for row in flight.rows]),
        counts=tuple([one.count for one in work]),
        emitted=tuple(emitted),
        accepted=sum(max(0, count - 1) for count in emitted) if drafted else 0,
        drafted=drafted,
        proposed=tuple([len(row.request.draft) for row in flight.rows]) if result.drafts else (),
        shape=flight.shape,
        predicted=flight.plan.predicted,
        seconds=result.seconds,
    )
