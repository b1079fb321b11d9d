"""A step's result applied: the only place where `tokens` grow and where `computed` moves forward."""

from __future__ import annotations

from collections.abc import Sequence

from headway.core.events import FirstToken, StepDone
from headway.core.request import Finish, Request
from headway.core.step import StepResult, Work
from headway.scheduling.flight import Flight
from headway.scheduling.row import Row
from headway.scheduling.state import Emission, State


def apply(state: State, flight: Flight, result: StepResult, now: int) -> None:
    """Move every row of the step forward by what was computed and emitted; finish, seal and trim.

    Rows that ended while the step was in flight are passed over: nothing of it counts for them. Fills
    `state.emissions` with one entry per row that emitted tokens, reported on its prompt, or ended.
    """
    size, windowed = state.cache.block_size, state.cache.windowed
    sampled = result.tokens
    ordinary = not (result.failed or result.finish or result.drafts)  # nothing but tokens
    emitted_counts = []
    for row, work in zip(flight.rows, flight.plan.work, strict=True):
        request = row.request
        if request.finish is not None:
            emitted_counts.append(0)
            continue
        request.pending -= work.count
        emitted = sampled.get(work.id, ())
        goes_on = work.sample and len(request.tokens) > request.prompt_len and not request.draft
        if ordinary and goes_on and len(emitted) == 1:
            finish = _append(request, emitted[0])
        else:
            emitted, finish = _advance(state, row, work, result, now)
        if finish is not None or windowed or row.forks or request.computed // size > row.table.sealed:
            settle(state, row, finish, now)
        if emitted or finish is not None or (work.prompt_logprobs and work.id in result.prompt_logprobs):
            state.emissions.append(Emission(request, emitted, finish))
        emitted_counts.append(len(emitted))
    state.land(flight, now)
    if state.log:
        state.log.append(step_done(flight, result, emitted_counts, now))


def _advance(state: State, row: Row, work: Work, result: StepResult, now: int) -> tuple[tuple[int, ...], Finish | None]:
    """Count what a step computed of a row -> tokens appended, and why it ended."""
    request = row.request
    failure = _failure(work, result)
    if failure is not None:
        return (), failure
    if not work.sample:
        request.computed = work.start + work.count
        done = work.pool and request.computed == request.prompt_len
        return (), Finish("stop") if done else result.finish.get(work.id)
    first = len(request.tokens) == request.prompt_len
    emitted, finish = accept(request, result.tokens[work.id])
    if first and state.log:
        state.log.append(FirstToken(now=now, id=work.id, waited=now - request.arrival))
    if finish is None and result.drafts and state.limits.max_drafts:
        propose(request, result.drafts.get(work.id, ()), result.odds.get(work.id, 1.0))
    if result.finish and (finish is None or finish.reason == "length"):  # a stop string in the very last token is one
        finish = result.finish.get(work.id, finish)
    return emitted, finish


def _failure(work: Work, result: StepResult) -> Finish | None:
    """Why nothing of this step counts for the row, if so."""
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
    if row.forks and request.computed >= request.prompt_len:
        state.release_forks(row)


def accept(request: Request, emitted: Sequence[int]) -> tuple[tuple[int, ...], Finish | None]:
    """Append what was emitted (accepted drafts, then one drawn token) up to the first that ends the request.

    Rejected drafts are rolled back: their positions do not count as computed. -> tokens appended, why it ended.
    """
    known = len(request.tokens)
    accepted = len(emitted) - 1
    if request.draft:
        request.draft = []
    finish = None
    for token in emitted:
        finish = _append(request, token)
        if finish is not None:
            break
    kept = len(request.tokens) - known
    request.computed = known + min(accepted, kept)
    return tuple(emitted[:kept]), finish


def _append(request: Request, token: int) -> Finish | None:
    """One token more, all before it being computed -> why the request ends with it, if it does."""
    tokens = request.tokens
    request.computed = len(tokens)
    tokens.append(token)
    if token in request.stop_ids and (
        request.generated > request.params.min_tokens or request.params.grammar is not None
    ):
        return Finish("stop", token)
    return Finish("length") if len(tokens) >= request.max_len else None


def propose(request: Request, drafts: Sequence[int], odds: float) -> None:
    """Note drafts for the next step; not more than could still be accepted before the drawn token reaches max_len.
    None if a step in flight has passed their position already."""
    if not request.pending:
        request.draft, request.odds = list(drafts[: request.max_len - len(request.tokens) - 1]), odds


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
        odds=tuple([row.request.odds for row in flight.rows]) if result.odds else (),
        shape=flight.shape.touching(result.experts),
        predicted=flight.plan.predicted,
        undrafted=flight.undrafted,
        seconds=result.seconds,
    )
