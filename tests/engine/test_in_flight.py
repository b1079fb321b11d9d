"""Two plans in flight, in virtual time: every law holds after every turn, and answers are as with one in flight."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.clock import VirtualClock
from headway.core.request import SamplingParams
from headway.core.step import Capabilities, RowInit
from headway.engine.loop import EngineLoop
from headway.engine.messages import Cancel, Submit
from headway.roofline.fixed import FixedCosts
from headway.scheduling.budget import Budget
from headway.scheduling.invariants import check
from headway.scheduling.policies import POLICIES
from headway.scheduling.scheduler import Scheduler
from tests.simulated import SimulatedExecutor

STOP = 3
COSTS = FixedCosts(step=1e-3, token=1e-4)


class Counting:
    """Token p of a request is p, and a stop id now and then, so that ends are met while the next step is in flight."""

    def token(self, row: RowInit, position: int) -> int:
        return STOP if (position * 7 + len(row.id) + row.prompt_len) % 11 == 0 else 10 + position


def loop_of(in_flight: int, blocks: int, **options: Any) -> EngineLoop:
    limits = Capabilities(
        block_size=4, blocks=(blocks, blocks), windows=(None, 6), max_rows=4, max_tokens_per_step=16, max_model_len=60,
        max_in_flight=in_flight,
    )  # fmt: skip
    clock = VirtualClock()
    scheduler = Scheduler(limits, key=b"k", model=COSTS, verify=True, **options)
    return EngineLoop(scheduler, SimulatedExecutor(limits, clock, COSTS, Counting()), clock, 100, eos_ids=(STOP,))


def serve(loop: EngineLoop, traffic: list[dict[str, Any]]) -> dict[tuple[str, int], tuple[list[int], str]]:
    """All of the traffic -> tokens and reason by (request, choice)."""
    answers: dict[tuple[str, int], tuple[list[int], str]] = {}
    turns = 0
    while not loop.idle or any(item["at"] >= turns for item in traffic):
        for number, item in enumerate(traffic):
            if item["at"] == turns:
                params = SamplingParams(max_tokens=item["most"], n=item["n"], seed=0)
                assert loop.submit(Submit(f"r{number}", (1,) * item["prompt"], params)) is None
            if item["cancel"] is not None and item["at"] + item["cancel"] == turns:
                loop.cancel(Cancel(f"r{number}"))
        deltas = loop.turn()
        check(loop.scheduler)
        for delta in deltas:
            tokens, reason = answers.get((delta.id, delta.choice), ([], ""))
            assert not reason, "nothing comes after the end"
            answers[delta.id, delta.choice] = ([*tokens, *delta.tokens], delta.finish.reason if delta.finish else "")
        turns += 1
        assert turns < 5000, "no request waits for ever"
    assert all(pool.available == pool.size for pool in loop.scheduler.cache.pools)
    return answers


traffics = st.lists(
    st.fixed_dictionaries(
        {
            "at": st.integers(0, 12),
            "prompt": st.integers(1, 40),
            "most": st.integers(1, 20),
            "n": st.sampled_from([1, 1, 2, 3]),
            "cancel": st.sampled_from([None, None, None, 1, 3, 9]),
        }
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(
    traffic=traffics,
    blocks=st.sampled_from([16, 20, 40]),
    policy=st.sampled_from(list(POLICIES.values())),
    budget=st.sampled_from([None, Budget(tokens=5), Budget(milliseconds=2.0)]),
)
def test_answers_are_the_same_with_one_and_with_two_in_flight(traffic, blocks, policy, budget) -> None:
    one, two = (serve(loop_of(depth, blocks, policy=policy, budget=budget), traffic) for depth in (1, 2))
    cancelled = {f"r{number}" for number, item in enumerate(traffic) if item["cancel"] is not None}
    assert one.keys() >= {key for key in two if key[0] not in cancelled}
    for key, (tokens, reason) in one.items():
        if key[0] in cancelled:  # it was somewhere else when that happened
            shorter, longer = sorted((tokens, two.get(key, ([], ""))[0]), key=len)
            assert longer[: len(shorter)] == shorter
        else:
            assert two[key] == (tokens, reason)


@pytest.mark.parametrize(("in_flight", "overlapped"), [(1, 0), (2, 8)])
def test_the_next_step_is_planned_while_its_tokens_are_drawn(in_flight: int, overlapped: int) -> None:
    loop = loop_of(in_flight, 40)
    loop.submit(Submit("r", (1,) * 3, SamplingParams(max_tokens=9, seed=0, ignore_eos=True)))
    seen = 0
    while not loop.idle:
        loop.turn()
        seen += bool(loop.scheduler.in_flight)
    assert seen == overlapped


def test_what_was_planned_for_a_row_that_ended_is_discarded_and_its_blocks_wait_for_it() -> None:
    loop = loop_of(2, 40)
    loop.submit(Submit("r", (1,) * 3, SamplingParams(max_tokens=9, seed=0, stop_token_ids=(14,), ignore_eos=True)))
    ends = []
    while not ends:
        ends = [delta for delta in loop.turn() if delta.finish]
    pool = loop.scheduler.cache.pools[0]
    assert loop.scheduler.in_flight == 1 and not loop.scheduler.running
    assert pool.available == pool.size - 2, "the step in flight writes its fifth token"
    assert loop.turn() == [] and pool.available == pool.size
