"""Many steps at once leave exactly what single steps leave."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway.core.clock import to_ps
from headway.core.events import AnyEvent, EventLog
from headway.core.folds import Totals
from headway.core.request import Request, SamplingParams
from headway.core.step import Capabilities, Seconds, StepResult
from headway.roofline.fixed import FixedCosts
from headway.scheduling.invariants import check
from headway.scheduling.policies import POLICIES
from headway.scheduling.policies.policy import Policy
from headway.scheduling.scheduler import Scheduler
from tests.scheduling.context_bench import limits_of

LAYOUTS = [((12,), (None,)), ((40,), (None,)), ((30, 12), (None, 5)), ((10,), (3,)), ((25, 25), (None, 8))]


class Run:
    """A scheduler whose rows all say made-up tokens; time is one per step."""

    def __init__(self, limits: Capabilities, policy: Policy, ttl: int | None) -> None:
        self.totals = Totals()
        self.events: list[AnyEvent] = []
        log = EventLog(self.totals, self.events.append)
        self.scheduler = Scheduler(
            limits,
            key=b"k",
            policy=policy,
            ttl=ttl,
            log=log,
            model=FixedCosts(step=2.0**-30) if policy.predicts else None,
        )
        self.now = 0
        self.heard: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}

    def add(self, id: str, prompt: list[int], most: int, n: int) -> None:
        params = SamplingParams(seed=0, n=n)
        self.scheduler.add(Request(id, prompt, params, max_len=len(prompt) + most, arrival=self.now))

    def step(self, most: int) -> None:
        """One plan; with it, up to `most` steps committed at once."""
        plan = self.scheduler.plan(self.now)
        if plan.empty:
            self.now += 1
            return
        steps = max(1, min(most, self.scheduler.horizon()))
        times = [self.now + 1 + index for index in range(steps)]
        self.now = times[-1]
        if steps == 1:
            tokens = {work.id: (self.says(work.id, 0),) for work in plan.work if work.sample}
            outputs = self.scheduler.commit(StepResult(plan.step, tokens), self.now)
        else:
            run = {work.id: tuple(self.says(work.id, index) for index in range(steps)) for work in plan.work}
            outputs = self.scheduler.commit_run(run, times)
        for output in outputs:
            self.heard.setdefault(output.request.id, []).extend(output.tokens)
            if output.finish:
                self.ends[output.request.id] = output.finish.reason
        check(self.scheduler)

    def says(self, id: str, ahead: int) -> int:
        """Every answer is the same count, so that answers share blocks too."""
        return len(self.heard.get(id, ())) + ahead

    def state(self) -> dict[str, Any]:
        scheduler = self.scheduler
        rows = {
            row.request.id: (row.request.tokens, row.request.computed, row.table.ids(), row.table.first, row.place)
            for row in scheduler.state.rows.values()
        }
        pools = [
            (pool.refs, pool.names, pool.by_name, pool.blank, list(pool.cached.items()))
            for pool in scheduler.cache.pools
        ]
        return {"rows": rows, "pools": pools, "heard": self.heard, "ends": self.ends, "gone": scheduler.state.gone}


@settings(max_examples=150, deadline=None)
@example(LAYOUTS[0], POLICIES["prefill-first"], 2, None, [(5, 24, 1), (5, 24, 1)], 50, 3)  # preempted after admission
@example(LAYOUTS[0], POLICIES["chunked"], 1, None, [(1, 2, 1), (1, 1, 1)], 2, 0)  # one waits while a run goes on
@given(
    layout=st.sampled_from(LAYOUTS),
    policy=st.sampled_from(list(POLICIES.values())),
    rows=st.integers(1, 6),
    ttl=st.sampled_from([None, 7]),
    requests=st.lists(st.tuples(st.integers(1, 14), st.integers(1, 24), st.sampled_from([1, 1, 3])), max_size=8),
    most=st.integers(2, 50),
    later=st.integers(0, 30),
)
def test_a_run_leaves_what_single_steps_leave(layout, policy, rows, ttl, requests, most, later) -> None:
    blocks, windows = layout
    limits = limits_of(blocks=blocks, windows=windows, max_rows=rows)
    single, runs = Run(limits, policy, ttl), Run(limits, policy, ttl)
    for half, upto in ((requests[::2], later), (requests[1::2], 10_000)):
        for number, (prompt, most_tokens, n) in enumerate(half):
            for run in (single, runs):
                if prompt + most_tokens < 30:
                    run.add(f"{upto}/{number}", list(range(prompt)), most_tokens, n)
        while runs.scheduler.state.rows and runs.now < upto:
            runs.step(min(most, upto - runs.now))
            while single.now < runs.now:
                single.step(1)
            assert single.state() == runs.state()
    sums = [{k: v for k, v in vars(run.totals).items() if not k.startswith("_")} for run in (single, runs)]
    assert sums[0] == sums[1], "events fold to the same figures"


def decoding(rows: int, most: int, **changes: Any) -> Run:
    """`rows` requests whose prompt of 4 tokens is computed, with their first decode in flight."""
    run = Run(limits_of(max_tokens_per_step=64, **changes), POLICIES["chunked"], None)
    for number in range(rows):
        run.add(f"r{number}", [number] * 4, most, 1)
    run.step(1)
    run.scheduler.plan(run.now)
    return run


@pytest.mark.parametrize(
    ("rows", "most", "changes", "horizon"),
    [
        (3, 10, {}, 9),  # until all reach their length
        (3, 40, {"blocks": (15,)}, 16),  # 3 blocks hold the prompts, 12 are left: 4 for each row, 16 steps
        (3, 40, {"blocks": (14,)}, 12),
        (3, 40, {"max_rows": 2, "blocks": (100,)}, 39),  # a third waits, but for a row
        (9, 8, {"blocks": (5,), "max_rows": 9}, 1),  # some wait for blocks, which may come
    ],
)
def test_horizon(rows: int, most: int, changes: dict[str, Any], horizon: int) -> None:
    assert decoding(rows, most, **changes).scheduler.horizon() == horizon


def test_horizon_is_one_while_a_prompt_is_computed_and_zero_without_a_plan() -> None:
    run = Run(limits_of(), POLICIES["chunked"], None)
    assert run.scheduler.horizon() == 0
    run.add("a", [0] * 40, 9, 1)
    run.scheduler.plan(0)
    assert run.scheduler.horizon() == 1


def test_a_run_may_end_with_a_stop_id_but_not_pass_one() -> None:
    run = Run(limits_of(), POLICIES["chunked"], None)
    params = SamplingParams(seed=0)
    run.scheduler.add(Request("a", [1, 2], params, max_len=30, stop_ids=frozenset({9})))
    run.step(1)
    run.scheduler.plan(1)
    with pytest.raises(ValueError, match="stop id before the last step"):
        run.scheduler.commit_run({"a": (1, 9, 1)}, [2, 3, 4])
    outputs = run.scheduler.commit_run({"a": (1, 1, 9)}, [2, 3, 4])
    assert outputs[0].tokens == (1, 1, 9) and outputs[0].finish is not None and outputs[0].finish.matched == 9


@pytest.mark.parametrize(
    ("steps", "deadline", "fits"),
    [(4, 5, True), (5, 5, False), (99, None, False)],
    ids=["before", "across", "too long"],
)
def test_a_run_that_would_pass_something_is_refused_and_changes_nothing(
    steps: int, deadline: int | None, fits: bool
) -> None:
    run = Run(limits_of(), POLICIES["chunked"], None)
    run.scheduler.add(Request("a", [1, 2], SamplingParams(seed=0), max_len=30, deadline=deadline))
    run.step(1)
    run.scheduler.plan(1)
    times = [2 + index for index in range(steps)]
    if fits:
        assert len(run.scheduler.commit_run({"a": range(steps)}, times)[0].tokens) == steps
    else:
        with pytest.raises(ValueError):
            run.scheduler.commit_run({"a": range(steps)}, times)
        assert run.scheduler.commit(StepResult(1, {"a": (1,)}), 2)[0].tokens == (1,)


def test_a_run_is_one_event_with_the_time_of_all_its_steps() -> None:
    run = decoding(2, 10)
    before = run.totals.steps
    tokens = {f"r{number}": range(5) for number in range(2)}
    run.scheduler.commit_run(tokens, [to_ps(i) for i in range(1, 6)], Seconds(forward=5.0))
    assert (run.totals.steps - before, run.totals.busy, run.totals.emitted_tokens) == (5, 5.0, 2 + 10)
