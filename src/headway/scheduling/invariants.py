"""The laws of the scheduler, as assertions on committed state. Tests check them after every step; production may
sample them. O(everything), so not for every step of a busy server."""

from __future__ import annotations

from collections import Counter

from headway.cache.kv import KVCache
from headway.cache.table import BlockTable
from headway.core.step import StepPlan
from headway.scheduling.planning import PREFIX
from headway.scheduling.row import Place, Row
from headway.scheduling.scheduler import Scheduler
from headway.scheduling.state import State


def check(scheduler: Scheduler) -> None:
    """AssertionError naming the law that is broken."""
    check_blocks(scheduler.state)
    check_names(scheduler.cache)
    check_places(scheduler.state)
    check_counters(scheduler.state)
    check_reserves(scheduler.state)
    check_flights(scheduler.state)


def check_blocks(state: State) -> None:
    """free + owned + cached = pool, and a block has as many references as owners."""
    for group, pool in enumerate(state.cache.pools):
        owners: Counter[int] = Counter()
        tables = [row.table for row in state.rows.values()]
        tables += [table for flight in state.flights for table in flight.tables]  # of rows that ended meanwhile
        for table in tables:
            held = table.blocks[group][table.first[group] :]
            assert len(set(held)) == len(held), "law: a table holds a block once"
            owners.update(held)
        assert all(pool.refs[block] == owners[block] for block in range(pool.size)), "law: refcount = owners"
        blank, cached = set(pool.blank), set(pool.cached)
        assert len(blank) == len(pool.blank), "law: a blank block is listed once"
        assert not (blank & cached or blank & owners.keys() or cached & owners.keys()), "law: a block is in one place"
        assert len(blank) + len(cached) + len(owners) == pool.size, "law: free + owned + cached = pool"
        assert pool.available == len(blank) + len(cached), "law: available = free + evictable"
        assert all(pool.names[block] is None for block in blank), "law: a blank block has no name"
        assert all(pool.names[block] is not None for block in cached), "law: a cached block has a name"
        released = list(pool.cached.values())
        assert released == sorted(released), "law: cached blocks are in order of release"


def check_names(cache: KVCache) -> None:
    """A name leads to one block per pool, and is known exactly as long as some pool has it."""
    holders: Counter[bytes] = Counter()
    for pool in cache.pools:
        named = {name: block for block, name in enumerate(pool.names) if name is not None}
        assert named == pool.by_name, "law: names and blocks are one to one"
        holders.update(named.keys())
    assert {name: known.pools for name, known in cache.known.items()} == dict(holders), "law: known = held by a pool"
    children = {(parent, name) for parent, names in cache.children.items() for name in names}
    assert children == {(known.parent, name) for name, known in cache.known.items()}, "law: children mirror parents"


def check_places(state: State) -> None:
    """A live request is in exactly one place, and only running ones own blocks."""
    waiting, running = list(state.queue), state.running
    forking = [fork for row in state.rows.values() for fork in row.forks]
    loading = [row for row, _ in state.loads.values()]
    places = {Place.WAITING: waiting, Place.RUNNING: running, Place.FORKING: forking, Place.LOADING: loading}
    assert all(row.place is place for place, rows in places.items() for row in rows), "law: a row knows its place"
    outside = waiting + forking + loading
    everywhere = running + outside
    assert len(everywhere) == len(state.rows), "law: a request is in exactly one place"
    assert all(state.rows.get(row.request.id) is row for row in everywhere), "law: every placed row is live"
    assert all(row.request.finish is None for row in everywhere), "law: a finished request is nowhere"
    assert [row.rank for row in running] == sorted(row.rank for row in running), "law: running is sorted by rank"
    assert all(fork.parent is row for row in everywhere for fork in row.forks), "law: a choice waits for its parent"
    assert sorted(state.queue.unordered(), key=lambda row: row.order) == waiting, "law: both orders hold all"
    assert state.waiting_tokens == sum(row.request.prompt_len for row in outside), "law: the queue's size"
    choices = [row for rows in state.choices.values() for row in rows]
    assert sorted(map(id, choices)) == sorted(map(id, everywhere)), "law: every live row is a choice of its request"
    for row in outside:
        assert not any(row.table.blocks) and row.table.capacity == 0, f"law: only running rows own blocks ({row})"
        assert row.request.planned == 0 and not row.held, f"law: a waiting row has nothing computed ({row})"


def check_flights(state: State) -> None:
    """What is in flight is what rows wait for, and every block it may touch is still owned."""
    pending: Counter[Row] = Counter()
    for flight in state.flights:
        for row, work in zip(flight.rows, flight.plan.work, strict=True):
            assert work.start + work.count <= row.table.capacity, f"law: no block of a plan in flight is free ({row})"
            if row.request.finish is None:
                pending[row] += work.count
    assert all(row.request.pending == pending[row] for row in state.rows.values()), "law: pending = what is in flight"
    assert len(state.flights) <= state.limits.max_in_flight, "law: no more plans in flight than the executor takes"
    assert len(state.running) <= state.limits.max_rows, "law: running rows never exceed max_rows"


def check_counters(state: State) -> None:
    """0 <= computed <= len(tokens) <= max_len, and whatever will be read has a block with the right content."""
    cache = state.cache
    for row in state.running:
        request, table = row.request, row.table
        assert 0 <= request.computed <= len(request.tokens), f"law: 0 <= computed <= len(tokens) ({row})"
        assert len(request.tokens) < request.max_len, f"law: a request at max_len has ended ({row})"
        assert request.planned < request.max_len, f"law: nothing is planned past the end ({row})"
        assert request.planned <= table.capacity, f"law: what is computed has a block ({row})"
        assert table.sealed <= request.computed // cache.block_size, f"law: only full blocks are sealed ({row})"
        known = (cache.long_after or 0) + table.long
        names = BlockTable(cache, request.namespace, request.adapter, known).name_blocks(
            request.tokens, len(request.tokens) // cache.block_size
        )
        for group, blocks in enumerate(table.blocks):
            first = table.first[group]
            assert first <= cache.first_needed(group, request.computed), f"law: what will be read is held ({row})"
            assert all(block == -1 for block in blocks[:first]), f"law: what is trimmed is gone ({row})"
            assert all(block >= 0 for block in blocks[first:]), f"law: what is held is a block ({row})"
            assert table.held(group) <= cache.holding(group, request.max_len - 1), f"law: holding is a bound ({row})"
            for index in range(first, table.sealed):
                name = cache.pools[group].names[blocks[index]]
                assert name in (None, names[index]), f"law: a sealed block has its own name or none ({row})"
        assert table.names == names[: len(table.names)], f"law: names follow from tokens ({row})"


def check_reserves(state: State) -> None:
    """What rows admitted with their worst case may still need is there, once all others yield."""
    cache = state.cache
    strict = [row for row in state.running if row.strict]
    for group, pool in enumerate(cache.pools):
        owned = {block for row in strict for block in row.table.blocks[group][row.table.first[group] :]}
        needs = [cache.holding(group, row.request.max_len - 1) - row.table.held(group) for row in strict]
        assert sum(max(0, need) for need in needs) <= pool.size - len(owned), "law: reserves of strict rows are there"


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """A plan just made: within capabilities, and nobody is skipped or stuck without a reason."""
    limits, state = scheduler.limits, scheduler.state
    planned = {work.id for work in plan.work}
    assert len(planned) == len(plan.work) <= limits.max_rows, "law: a plan never exceeds max_rows"
    assert sum(work.count for work in plan.work) <= limits.max_tokens_per_step, "law: a plan never exceeds its tokens"
    reported = sum(work.logits for work in plan.work if work.prompt_logprobs)
    assert reported <= (limits.max_prompt_logits or reported), "law: a plan never exceeds its prompt logits"
    assert all(work.count > 0 for work in plan.work), "law: no empty work"
    assert sum(len(work.draft) for work in plan.work) <= limits.max_drafts, "law: a plan never exceeds its drafts"
    assert planned <= {row.request.id for row in state.running}, "law: only running rows are planned"
    for row in state.running:
        skipped = row.request.id not in planned
        may_pause = scheduler.policy.pauses_decode or (plan.empty and state.flights)
        assert not skipped or row.request.todo != 1 or may_pause, f"law: no decode is skipped ({row})"
        assert skipped or row.held, f"law: the executor has a row before it works on it ({row})"
    for work in plan.work:
        assert work.start + work.count <= state.rows[work.id].table.capacity, "law: what is planned has blocks"
    if plan.empty:
        assert not state.running or state.flights, "law: something moves while anything runs"
        assert not len(state.queue) or scheduler.blocked or state.flights, (
            "law: an empty plan with a queue has a reason"
        )
    elif any(row.request.todo > 1 for row in state.running) and not scheduler.policy.pauses_decode:
        assert any(not work.decode for work in plan.work) or _prompt_in(scheduler, plan), (
            "law: prompts move in every step"
        )
    assert scheduler.blocked != PREFIX or state.running, "law: a shared prefix is waited for only while something runs"
    forking = any(row.forks for row in state.rows.values())
    assert not forking or state.running or len(state.queue), "law: no choice waits for ever"


def _prompt_in(scheduler: Scheduler, plan: StepPlan) -> bool:
    """A prompt's last token may be a chunk of one."""
    rows = scheduler.state.rows
    return any(not rows[work.id].request.generated for work in plan.work)
