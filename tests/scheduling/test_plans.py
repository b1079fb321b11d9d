"""The scheduler, as tables: what arrives, and the plans that follow, step by step.

`a[0:4]*` = row a computes positions 0 to 3 and samples; `-a` = the executor drops row a. Blocks hold 4 tokens, a step
16, and a request generates 3 tokens, unless a row says otherwise.
"""

from __future__ import annotations

from typing import Any

import pytest

from headway.core.events import Admitted, Preempted
from headway.core.request import Request, SamplingParams
from headway.core.step import StepResult
from headway.scheduling.budget import Budget
from headway.scheduling.policies import POLICIES, policy_named
from tests.scheduling.context_bench import Ask, Bench, limits_of

Case = tuple[str, dict[str, Any], list[Ask], list[str]]

CASES: list[Case] = [
    (
        "a prompt is computed in one step that samples, then one token per step",
        {},
        [Ask("a", 4)],
        ["a[0:4]*", "a[4:5]*", "a[5:6]*", "-a"],
    ),
    (
        "a prompt longer than a step comes in chunks, and only the last samples",
        {},
        [Ask("a", 40, 1)],
        ["a[0:16]", "a[16:32]", "a[32:40]*", "-a"],
    ),
    (
        "a step mixes decodes, a short newcomer, and the rest of a longer prompt, in that order",
        {},
        [Ask("a", 4), Ask("b", 20), Ask("c", 3, at=1)],
        [
            "a[0:4]* b[0:12]",
            "a[4:5]* c[0:3]* b[12:20]*",
            "a[5:6]* b[20:21]* c[3:4]*",
            "b[21:22]* c[4:5]* -a",
            "-b -c",
        ],
    ),
    (
        "a row that outgrows the length at which its model changes positions is computed anew, sharing nothing",
        {"long_after": 8},
        [Ask("a", 6, 5)],
        ["a[0:6]*", "a[6:7]*", "a[7:8]*", "-a", "a[0:9]*", "a[9:10]*", "-a"],
    ),
    (
        "long rows share blocks with each other, and not with short ones",
        {"long_after": 8},
        [Ask("a", 8, 1, like="x"), Ask("b", 12, 1, at=1, like="x"), Ask("c", 12, 1, at=2, like="x")],
        ["a[0:8]*", "b[0:12]* -a", "c[8:12]* -b", "-c"],
    ),
    (
        "a budget in tokens cuts chunks",
        {"budget": Budget(tokens=7)},
        [Ask("a", 16, 1)],
        ["a[0:7]", "a[7:14]", "a[14:16]*", "-a"],
    ),
    (
        "decodes are never dropped for the budget, and prompts move beside them",
        {"budget": Budget(tokens=1)},
        [Ask("a", 1, 4), Ask("b", 3, 2)],
        ["a[0:1]*", "a[1:2]* b[0:1]", "a[2:3]* b[1:2]", "a[3:4]* b[2:3]*", "b[3:4]* -a", "-b"],
    ),
    (
        "of prompts, much shorter ones go first, with half of the step, and one that waits longest has the other half",
        {"budget": Budget(tokens=8)},
        [Ask("a", 20, 1), Ask("b", 9, 1, at=1), Ask("c", 3, 1, at=1), Ask("d", 6, 1, at=1)],
        ["a[0:8]", "c[0:3]* d[0:1] a[8:12]", "a[12:20]* -c", "b[0:8] -a", "b[8:9]* d[1:6]*", "-b -d"],
    ),
    (
        "prompts of about one length keep their order",
        {"budget": Budget(tokens=8)},
        [Ask("a", 20, 1), Ask("b", 12, 1)],
        ["a[0:8]", "a[8:16]", "a[16:20]* b[0:4]", "b[4:12]* -a", "-b"],
    ),
    (
        "rows are limited; a row that ends makes room in the next step",
        {"max_rows": 1},
        [Ask("a", 2, 2), Ask("b", 2, 1), Ask("c", 2, 1)],
        ["a[0:2]*", "a[2:3]*", "b[0:2]* -a", "c[0:2]* -b", "-c"],
    ),
    (
        "lower priority numbers go first, then earlier arrivals",
        {"max_rows": 1},
        [Ask("a", 2, 2), Ask("b", 2, 1), Ask("c", 2, 1, at=1, priority=-1)],
        ["a[0:2]*", "a[2:3]*", "c[0:2]* -a", "b[0:2]* -c", "-b"],
    ),
    (
        "a prompt seen before is reused up to the last full block",
        {},
        [Ask("a", 10, 1), Ask("b", 10, 1, like="a", at=2)],
        ["a[0:10]*", "-a", "b[8:10]*", "-b"],
    ),
    (
        "a prompt of full blocks only still computes its last block, to have logits",
        {},
        [Ask("a", 8, 1), Ask("b", 8, 1, like="a", at=2)],
        ["a[0:8]*", "-a", "b[4:8]*", "-b"],
    ),
    (
        "a running request's prompt is shared as soon as it is computed",
        {},
        [Ask("a", 9, 3), Ask("b", 9, 1, like="a", at=1)],
        ["a[0:9]*", "a[9:10]* b[8:9]*", "a[10:11]* -b", "-a"],
    ),
    (
        "a prompt that is being computed just now is not computed twice: who has it too waits for the step to end",
        {},
        [Ask("a", 9, 3), Ask("b", 9, 1, like="a")],
        ["a[0:9]*", "a[9:10]* b[8:9]*", "a[10:11]* -b", "-a"],
    ),
    (
        "whoever shares a prefix waits for it over several steps, and those who came later go on meanwhile",
        {"budget": Budget(tokens=8)},
        [Ask("a", 18, 1), Ask("b", 17, 1, like="a"), Ask("c", 3, 1)],
        ["c[0:3]* a[0:5]", "a[5:13] -c", "a[13:18]*", "b[16:17]* -a", "-b"],
    ),
    (
        "many with one prompt share what the first computes",
        {},
        [Ask("a", 9, 1), Ask("b", 9, 1, like="a"), Ask("c", 9, 1, like="a"), Ask("d", 3, 1)],
        ["d[0:3]* a[0:9]*", "b[8:9]* c[8:9]* -d -a", "-b -c"],
    ),
    (
        "whoever shares less than half of its prompt does not wait for it",
        {},
        [Ask("a", 6, 1), Ask("b", 9, 1, like="a")],
        ["a[0:6]* b[0:9]*", "-a -b"],
    ),
    (
        "whoever waits for a prefix keeps its place among the rows",
        {"max_rows": 2},
        [Ask("a", 9, 1), Ask("b", 9, 1, like="a"), Ask("c", 9, 1)],
        ["a[0:9]*", "b[8:9]* c[0:9]* -a", "-b -c"],
    ),
    (
        "static batches are formed at once, equal prompts and all",
        {"policy": POLICIES["static"]},
        [Ask("a", 9, 1), Ask("b", 9, 1, like="a")],
        ["a[0:9]* b[0:7]", "b[7:9]* -a", "-b"],
    ),
    (
        "prompt logprobs need every position, so the prompt is not looked up",
        {},
        [Ask("a", 9, 1), Ask("b", 9, 1, like="a", at=2, options={"prompt_logprobs": 0})],
        ["a[0:9]*", "-a", "b[0:9]*", "-b"],
    ),
    (
        "n choices share the computed prompt, and each computes its last token again",
        {},
        [Ask("a", 6, 2, n=3)],
        ["a[0:6]*", "a[6:7]* a#1[5:6]* a#2[5:6]*", "a#1[6:7]* a#2[6:7]* -a", "-a#1 -a#2"],
    ),
    (
        "choices go before later arrivals, and fall back to the prefix cache when their parent is gone",
        {"max_rows": 1},
        [Ask("a", 6, 1, n=2), Ask("b", 2, 1)],
        ["a[0:6]*", "a#1[4:6]* -a", "b[0:2]* -a#1", "-b"],
    ),
    (
        "a decode without a block takes the blocks of the row that came last, which resumes from what is still cached",
        {"blocks": (6,)},
        [Ask("a", 8, 8), Ask("b", 7, 8)],
        [
            "a[0:8]* b[0:7]*",
            "a[8:9]* b[7:8]*",
            "a[9:10]* b[8:9]*",
            "a[10:11]* b[9:10]*",
            "a[11:12]* b[10:11]*",
            "a[12:13]* -b",
            "a[13:14]*",
            "a[14:15]*",
            "b[8:12]* -a",
            "b[12:13]*",
            "b[13:14]*",
            "-b",
        ],
    ),
    (
        "blocks are taken from the lowest priority, even from oneself",
        {"blocks": (6,)},
        [Ask("a", 8, 5), Ask("b", 8, 5, priority=-1)],
        [
            "b[0:8]* a[0:8]*",
            "b[8:9]* a[8:9]*",
            "b[9:10]* a[9:10]*",
            "b[10:11]* a[10:11]*",
            "b[11:12]* a[11:12]*",
            "-b -a",
        ],
    ),
    (
        "admission leaves one block of headroom for every running row and for the newcomer",
        {"blocks": (5,)},
        [Ask("a", 8, 2), Ask("b", 8, 2)],
        ["a[0:8]*", "a[8:9]*", "b[0:8]* -a", "b[8:9]*", "-b"],
    ),
    (
        "a window group holds the window and a step, not the context",
        {"blocks": (5,), "windows": (6,), "max_tokens_per_step": 8},
        [Ask("a", 30)],
        ["a[0:8]", "a[8:16]", "a[16:24]", "a[24:30]*", "a[30:31]*", "a[31:32]*", "-a"],
    ),
    (
        "prefill-first pauses decodes while there is a prompt to compute",
        {"policy": POLICIES["prefill-first"]},
        [Ask("a", 4), Ask("b", 20, 2), Ask("c", 3, 2, at=1)],
        [
            "a[0:4]* b[0:12]",
            "b[12:20]* c[0:3]*",
            "a[4:5]* b[20:21]* c[3:4]*",
            "a[5:6]* -b -c",
            "-a",
        ],
    ),
    (
        "static forms a batch, whatever the step's budget, and the next one when all of it is done",
        {"policy": POLICIES["static"]},
        [Ask("a", 4, 2), Ask("b", 20, 3), Ask("c", 3, 1, at=1)],
        ["a[0:4]* b[0:12]", "b[12:20]*", "a[4:5]* b[20:21]*", "b[21:22]* -a", "c[0:3]* -b", "-c"],
    ),
    (
        "blocks that a running prompt has still to take are not given to a newcomer",
        {"policy": POLICIES["static"], "blocks": (9,)},
        [Ask("a", 20, 1), Ask("b", 12, 1)],
        ["a[0:16]", "a[16:20]*", "b[0:12]* -a", "-b"],
    ),
]


def bench(settings: dict[str, Any]) -> Bench:
    options = {name: value for name, value in settings.items() if name in ("policy", "budget", "ttl", "bound")}
    return Bench(limits_of(**{k: v for k, v in settings.items() if k not in options}), **options)


@pytest.mark.parametrize(("settings", "asks", "plans"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_plans(settings: dict[str, Any], asks: list[Ask], plans: list[str]) -> None:
    assert bench(settings).play(asks) == plans


@pytest.mark.parametrize(("settings", "asks"), [case[1:3] for case in CASES], ids=[case[0] for case in CASES])
def test_answers_do_not_depend_on_company_policy_or_memory(settings: dict[str, Any], asks: list[Ask]) -> None:
    together = bench(settings)
    together.play(asks)
    assert together.finishes, "the case ends its requests"
    for ask in asks:
        alone = Bench(limits_of(long_after=settings.get("long_after")))
        alone.play([Ask(ask.id, ask.prompt, ask.most, like=ask.like, n=ask.n)])
        for id, tokens in alone.outputs.items():
            assert together.outputs[id] == tokens
            assert together.finishes[id] == alone.finishes[id] == "length"


def test_a_request_preempted_twice_is_readmitted_with_its_worst_case_reserved() -> None:
    played = Bench(limits_of(blocks=(8,), max_rows=3))
    played.play([Ask("c", 10, 4), Ask("d", 4, 12), Ask("a", 3, 20, at=2), Ask("b", 3, 13, at=3)])
    assert [event.id for event in played.events if isinstance(event, Preempted)] == ["b", "b"]
    last = [event for event in played.events if isinstance(event, Admitted)][-1]
    assert (last.id, last.preemptions, last.now) == ("b", 2, 24), "not before a is done: 4 blocks of worst case, 3 free"
    assert set(played.finishes.values()) == {"length"}


def test_a_choice_does_not_copy_a_block_that_its_preempted_parent_is_still_computing_again() -> None:
    played = Bench()
    played.play([Ask("a", 6, n=2)], steps=1)
    played.scheduler.state.preempt(played.scheduler.state.rows["a"], played.now)
    assert played.step() == "a[4:7]* a#1[4:6]* -a"
    played.play([])
    alone = Bench()
    alone.play([Ask("a", 6, n=2)])
    assert played.outputs == alone.outputs


def test_a_row_with_its_worst_case_reserved_is_never_the_one_to_yield() -> None:
    played = Bench(limits_of(blocks=(12,)))
    played.play([Ask("a", 12, 24), Ask("b", 4, 20)], steps=1)
    for _ in range(2):
        played.scheduler.state.preempt(played.scheduler.state.rows["b"], played.now)
        played.step()
    played.play([])
    assert [event.id for event in played.events if isinstance(event, Preempted)] == ["b", "b", "a"]
    assert played.finishes == {"a": "length", "b": "length"}


@pytest.mark.parametrize(
    ("settings", "asks", "blocked"),
    [
        ({"max_rows": 1}, [Ask("a", 2), Ask("b", 2)], "rows"),
        ({}, [Ask("a", 16), Ask("b", 12)], "budget"),
        ({"blocks": (3,)}, [Ask("a", 8), Ask("b", 2)], "blocks"),
        ({"policy": POLICIES["static"]}, [Ask("a", 8), Ask("b", 2, at=1)], "policy"),
        ({}, [Ask("a", 8)], ""),
        ({}, [Ask("a", 9), Ask("b", 9, like="a")], "prefix"),
        ({"max_rows": 2}, [Ask("a", 9), Ask("b", 9, like="a"), Ask("c", 9)], "prefix"),
        ({"max_rows": 2}, [Ask("a", 9), Ask("b", 9, like="a"), Ask("c", 2)], "rows"),
    ],
)
def test_a_waiting_request_always_has_a_reason(settings: dict[str, Any], asks: list[Ask], blocked: str) -> None:
    played = bench(settings)
    played.play(asks, steps=1 + max(ask.at for ask in asks))
    assert played.scheduler.blocked == blocked


@pytest.mark.parametrize("end", ["cancel", "fail"])
def test_whoever_waits_for_a_prefix_computes_it_when_the_one_that_did_is_gone(end: str) -> None:
    scheduler = Bench().scheduler
    for id in ("a", "b"):
        scheduler.add(Request(id, range(9), SamplingParams(seed=0), max_len=10))
    plan = scheduler.plan(0)
    assert [work.id for work in plan.work] == ["a"] and scheduler.blocked == "prefix"
    if end == "cancel":
        scheduler.cancel("a", 1)
    scheduler.commit(StepResult(plan.step, {"a": (1,)}, failed={"a": "out of luck"} if end == "fail" else {}), 1)
    assert [(work.id, work.start, work.count) for work in scheduler.plan(1).work] == [("b", 0, 9)]


def test_the_step_that_takes_blocks_back_admits_nobody() -> None:
    played = Bench(limits_of(blocks=(6,)))
    played.play([Ask("a", 8, 8), Ask("b", 7, 8)], steps=6)
    assert played.scheduler.blocked == "preempting"


def test_policies_have_names() -> None:
    names = ["chunked", "prefill-first", "static", "fcfs", "priority", "fair", "slo"]
    assert [policy_named(name).name for name in names] == list(POLICIES) == names
    with pytest.raises(Exception, match=f"policy: 'fifo' is not one of {', '.join(names)}"):
        policy_named("fifo")
