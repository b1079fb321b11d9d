"""A recorded run replays to the same plans, without a single token in the recording; and a changed one is found out."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.core.clock import VirtualClock, to_ps
from headway.core.errors import BadInput, Rejected
from headway.core.events import EventLog
from headway.core.folds import Totals
from headway.core.request import Finish, Request, SamplingParams
from headway.core.step import Capabilities, StepPlan, StepResult
from headway.engine.event_file import EventFileError, EventWriter
from headway.roofline.fixed import FixedCosts
from headway.scheduling.budget import Budget
from headway.scheduling.invariants import check
from headway.scheduling.policies import POLICIES
from headway.scheduling.scheduler import Scheduler
from headway.simulate.replay import replay
from tests.simulated import HashedTokens, SimulatedExecutor

LAYOUTS = [((16,), (None,)), ((14, 12), (None, 5)), ((40,), (None,))]
COSTS = FixedCosts(step=1e-3, token=1e-4)

requests = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.lists(st.integers(0, 1), min_size=1, max_size=20),
            "most": st.integers(1, 12),
            "wait": st.integers(0, 4),
            "n": st.sampled_from([1, 1, 1, 2, 3]),
            "priority": st.integers(0, 1),
            "patience": st.none() | st.integers(1, 20),
            "report": st.sampled_from([None, None, 0]),
            "then": st.sampled_from(
                ["", "", "", "cancel", "cancel in flight", "stop", "fail", "break", "drafts", "run"]
            ),
        }
    ),
    max_size=12,
)


def record(
    path: Path, traffic: list[dict[str, Any]], before: list[dict[str, Any]] | None = None, **options: Any
) -> Totals:
    """Serve the traffic on the simulator, with a recording, after serving what came `before` without one."""
    blocks, windows = options.pop("layout", LAYOUTS[0])
    limits = Capabilities(
        block_size=4,
        blocks=blocks,
        windows=windows,
        max_rows=3,
        max_tokens_per_step=12,
        max_model_len=40,
        max_drafts=100,
    )
    log, totals, clock = EventLog(), Totals(), VirtualClock()
    scheduler = Scheduler(limits, key=b"secret", log=log, **options)
    executor = SimulatedExecutor(limits, clock, COSTS, HashedTokens(1, 2))
    serve(scheduler, executor, clock, before or [])
    with EventWriter(path, scheduler.header()) as writer:
        log.subscribe(writer)
        log.subscribe(totals)
        serve(scheduler, executor, clock, traffic)
    return totals


def serve(
    scheduler: Scheduler, executor: SimulatedExecutor, clock: VirtualClock, traffic: list[dict[str, Any]]
) -> None:
    for number, item in enumerate(traffic):
        for _ in range(item["wait"]):
            turn(scheduler, executor, clock)
        patience = item["patience"]
        request = Request(
            f"r{number % 3}",  # ids come again
            item["prompt"],
            SamplingParams(seed=3, n=item["n"], prompt_logprobs=item["report"]),
            max_len=len(item["prompt"]) + item["most"],
            stop_ids=frozenset({0}) if item["then"] == "stop" else frozenset(),
            arrival=clock.now(),
            priority=item["priority"],
            deadline=None if patience is None else clock.now() + patience * 1_500_000_000,
        )
        try:
            choices = scheduler.add(request)
        except Rejected:
            choices = ()
        turn(scheduler, executor, clock, item["then"], [choice.id for choice in choices])
    while not scheduler.idle:
        turn(scheduler, executor, clock)
        clock.advance_to(clock.now() + 1)


def turn(scheduler: Scheduler, executor: SimulatedExecutor, clock: VirtualClock, then: str = "", ids: Any = ()) -> None:
    """One turn of an engine, with something happening to `ids`."""
    if then == "cancel":
        for id in ids:
            scheduler.cancel(id, clock.now())
    plan = scheduler.plan(clock.now())
    if plan.empty:
        scheduler.take_emissions()
        return
    deadline = scheduler.next_deadline
    if then == "run" and scheduler.horizon() > 1 and (deadline is None or deadline > clock.now() + to_ps(0.01)):
        steps = min(4, scheduler.horizon())
        executor.collect(executor.submit(plan))
        times = [clock.now() + index for index in range(steps)]
        scheduler.commit_run({work.id: [1] * steps for work in plan.work}, times)
        clock.advance_to(times[-1])
        return
    if then == "break":
        executor.reset()
        scheduler.commit(StepResult(plan.step, failed={work.id: "broken" for work in plan.work}), clock.now())
        scheduler.executor_reset(clock.now())
        return
    result = executor.collect(executor.submit(plan))
    if then == "cancel in flight":
        for id in ids:
            scheduler.cancel(id, clock.now())
    scheduler.commit(disturbed(plan, result, then, ids), clock.now())


def disturbed(plan: StepPlan, result: StepResult, then: str, ids: Any) -> StepResult:
    here = [work.id for work in plan.work if work.id in ids]
    changes: dict[str, Any] = {}
    if then == "stop":
        changes["finish"] = {id: Finish("stop", "a stop string") for id in here}
    elif then == "fail":
        changes["failed"] = dict.fromkeys(here, "out of luck")
    elif then == "drafts":
        changes["drafts"] = {work.id: (1, 0, 1) for work in plan.work if work.sample}
    return StepResult(plan.step, result.tokens, seconds=result.seconds, **changes)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    traffic=requests,
    layout=st.sampled_from(LAYOUTS),
    policy=st.sampled_from(list(POLICIES.values())),
    budget=st.sampled_from([None, Budget(tokens=5), Budget(milliseconds=2.0)]),
    ttl=st.sampled_from([None, 5_000_000_000]),
    before=st.just([]) | requests,
)
def test_a_recorded_run_replays_to_the_same_plans(tmp_path: Path, traffic, layout, policy, budget, ttl, before) -> None:
    path = tmp_path / "run.events"
    path.unlink(missing_ok=True)
    totals = record(path, traffic, before, layout=layout, policy=policy, budget=budget, ttl=ttl, model=COSTS)
    outcome = replay(path, COSTS, watch=check)
    assert outcome.difference is None
    assert outcome.steps == len(path.read_text().split('"event":"step"')) - 1
    assert totals.live == 0


PREFIXES = [
    {"prompt": [0, 1] * 8, "most": 3, "wait": 2, "n": 1, "priority": 0, "patience": None, "report": None, "then": ""}
] * 4


def test_prefix_hits_happen_again_though_no_token_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "run.events"
    totals = record(path, PREFIXES)
    assert totals.cached_tokens == 3 * 12
    recorded = [json.loads(line) for line in path.read_text().splitlines()]
    assert not any("tokens" in event for event in recorded), "lengths and names only"
    assert replay(path).difference is None


def test_a_recording_may_begin_with_a_warm_cache(tmp_path: Path) -> None:
    path = tmp_path / "run.events"
    totals = record(path, PREFIXES[:1], before=PREFIXES[:1])
    assert totals.cached_tokens == 12
    assert replay(path).difference is None
    rewrite(path, lambda event: event.update({"cache": []} if event["event"] == "header" else {}))
    outcome = replay(path)
    assert outcome.difference is not None, "without it, the prompt is computed whole"
    assert outcome.difference.plan.work[0].count == 12


def test_a_cache_that_is_none_of_that_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.events"
    record(path, PREFIXES[:1], before=PREFIXES[:1])
    rewrite(path, lambda event: event.get("cache") and event["cache"][0]["blank"].pop())
    with pytest.raises(EventFileError, match="line 1: a pool of 16 blocks starts with each of them once"):
        replay(path)


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def another_policy(event: dict[str, Any]) -> None:
    if event["event"] == "header":
        event["policy"] = "static"


def another_prompt(event: dict[str, Any]) -> None:
    if event.get("id") == "r1" and "names" in event:
        event["names"] = []


def another_result(event: dict[str, Any]) -> None:
    if event["event"] == "step" and event["step"] == 1:
        event["emitted"] = [0] * len(event["rows"])


@pytest.mark.parametrize("change", [another_policy, another_prompt, another_result])
def test_the_first_step_that_is_planned_otherwise_is_named(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "run.events"
    record(path, PREFIXES)
    steps = replay(path).steps
    rewrite(path, change)
    outcome = replay(path)
    assert outcome.difference is not None
    assert 0 < outcome.difference.step == outcome.difference.plan.step == outcome.steps < steps


def columns_of_unequal_length(event: dict[str, Any]) -> None:
    if event["event"] == "step":
        event["emitted"] = []


def a_row_nobody_asked_for(event: dict[str, Any]) -> None:
    if event["event"] == "step":
        event["rows"] = [99]


def an_end_without_a_beginning(event: dict[str, Any]) -> None:
    if event["event"] == "finished":
        event["id"] = "nobody"


@pytest.mark.parametrize("change", [columns_of_unequal_length, a_row_nobody_asked_for, an_end_without_a_beginning])
def test_a_recording_that_contradicts_itself_is_refused_with_its_line(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "run.events"
    record(path, PREFIXES)
    rewrite(path, change)
    with pytest.raises(EventFileError, match=r"line \d+: does not fit the lines before it"):
        replay(path)


DAMAGED = (None, -1, 0, 1, 7, 1 << 62, 1 << 70, 1.5, float("1e300"), "x", [], [[]], [-1], [1 << 62], {}, True)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested JSON."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in inside:
        yield (*path, key)
        yield from places(below, (*path, key))


def test_a_damaged_recording_is_replayed_or_refused_in_a_sentence(tmp_path: Path) -> None:
    """Any field of any line may hold anything, or be missing."""
    path = tmp_path / "run.events"
    record(path, PREFIXES[:2], before=PREFIXES[:1], model=COSTS, budget=Budget(milliseconds=2.0))
    text = path.read_text().splitlines()
    every = [(number, place) for number, line in enumerate(text) for place in places(json.loads(line))]
    picked = random.Random(5)
    refused = 0
    for _ in range(600):
        number, (*above, last) = picked.choice(every)
        line = json.loads(text[number])
        into: Any = line
        for key in above:
            into = into[key]
        if picked.random() < 0.1:
            del into[last]
        else:
            into[last] = picked.choice(DAMAGED)
        path.write_text("\n".join([*text[:number], json.dumps(line), *text[number + 1 :]]) + "\n")
        try:
            replay(path, COSTS)
        except (EventFileError, BadInput) as error:
            refused += 1
            assert str(error).startswith(str(path)) and "\n" not in str(error), (line, error)
    assert refused > 200


@pytest.mark.parametrize(
    ("kind", "field", "value", "sentence"),
    [
        ("queued", "prompt_tokens", 1 << 62, r"line 2: .* - at `\$.prompt_tokens`"),
        ("queued", "max_len", 1 << 20, "line 2: does not fit the lines before it: max_len"),
        ("finished", "names", ["AAAA"] * 100, "names: of more blocks than its tokens fill"),
        ("step", "step", 99, "step: it was not planned"),
        ("step", "proposed", [1 << 24], "proposed"),
        ("header", "limits", {"blocks": [1 << 62], "windows": [None]}, "line 1: limits.blocks: 4611686018427387904"),
    ],
)
def test_what_a_recording_claims_is_bounded(tmp_path: Path, kind: str, field: str, value: Any, sentence: str) -> None:
    path = tmp_path / "run.events"
    record(path, PREFIXES)

    def claim(event: dict[str, Any]) -> None:
        if event["event"] == kind:
            event[field] = event[field] | value if isinstance(value, dict) else value

    rewrite(path, claim)
    with pytest.raises(EventFileError, match=sentence):
        replay(path)


def test_a_budget_in_milliseconds_needs_the_model_of_the_run(tmp_path: Path) -> None:
    path = tmp_path / "run.events"
    record(path, PREFIXES, budget=Budget(milliseconds=2.0), model=COSTS)
    with pytest.raises(BadInput, match="give the step-time model"):
        replay(path)
