"""A smaller model drafts: answers are those without it, to the bit, calm, crowded, chunked, preempted and
cancelled; and its cache holds what it would hold had it computed every prompt alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headway.core.events import EventLog, Preempted
from headway.core.folds import Totals
from headway.core.request import SamplingParams
from headway.core.step import RowInit, StepPlan, Work
from headway.engine.messages import Cancel, Delta, Submit
from headway.executor.draft import LAG, ModelProposer
from headway.ops import native
from headway.ops.native.backend import NativeBackend
from headway.scheduling.budget import Budget
from headway.scheduling.invariants import check
from headway.speculation.proposer import UNKNOWN
from tests.engine.test_speculation import FIELDS, said
from tests.engine.tiny import VOCAB, TinyModel, complete, drain, prompts, tokens_of

PROMPTS = prompts(16)
NOISE = 0.02  # of the weights: three drafts of four are right
pytestmark = pytest.mark.skipif(bool(native.why_not()), reason="no kernels")


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel(NativeBackend(threads=2))


@pytest.fixture(scope="module", params=[None, 40], ids=["full", "windows"])
def draft(request: pytest.FixtureRequest) -> TinyModel:
    return TinyModel(NativeBackend(threads=2), window=request.param, noise=NOISE)


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: " ".join(fields))
def test_answers_are_the_same_with_drafts(model: TinyModel, draft: TinyModel, fields: dict[str, Any]) -> None:
    params = SamplingParams(**{"seed": 5, "max_tokens": 14, **fields})
    plain = said(complete(model.loop(max_rows=1), PROMPTS, params), params.n)
    totals, events = Totals(), []
    log = EventLog(totals, lambda event: events.append(event) if isinstance(event, Preempted) else None)
    for options in ({}, {"budget": Budget(tokens=7)}, {"blocks": 24 if params.n == 1 else 30}):
        loop = model.loop(draft=draft, log=log, **options)  # type: ignore[arg-type]
        assert said(complete(loop, PROMPTS, params), params.n) == plain
        check(loop.scheduler)
        assert all(pool.available == pool.size for pool in loop.scheduler.cache.pools)
    if "stop_token_ids" not in fields:  # those end early
        assert totals.drafted_tokens > 40 and totals.accepted_tokens and events, "some were preempted"


def test_the_model_itself_is_always_right(model: TinyModel) -> None:
    """Through prefix hits, chunks and preemption: a draft that attends to a wrong key would be wrong itself."""
    twin, totals = TinyModel(NativeBackend(threads=2)), Totals()
    for options in ({}, {"budget": Budget(tokens=7)}, {"blocks": 30}):
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=3, max_tokens=24, ignore_eos=True)
            loop = model.loop(draft=twin, log=EventLog(totals), **options)  # type: ignore[arg-type]
            first = complete(loop, PROMPTS, params)
            longer = [(*PROMPTS[int(id)], *tokens_of(deltas)[:20]) for id, deltas in first.items()]
            again = complete(loop, longer, params)
            assert options or all(deltas[0].cached for deltas in again.values())
    assert totals.drafted_tokens > 2000 and totals.accepted_tokens == totals.drafted_tokens


def test_cancelled_in_the_middle(model: TinyModel, draft: TinyModel) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    plain = complete(model.loop(max_rows=1), PROMPTS, params)
    loop = model.loop(draft=draft)
    for number, tokens in enumerate(PROMPTS):
        loop.submit(Submit(id=str(number), tokens=tokens, params=params))
    deltas: list[Delta] = []
    for turn in range(6):
        deltas += loop.turn()
        loop.cancel(Cancel(str(turn * 3)))
        check(loop.scheduler)
    deltas += drain(loop)
    assert all(pool.available == pool.size for pool in loop.scheduler.cache.pools)
    for id, expected in plain.items():
        told = tokens_of([delta for delta in deltas if delta.id == id])
        assert told == tokens_of(expected)[: len(told)]


def test_answers_are_the_same_after_a_step_broke(model: TinyModel, draft: TinyModel) -> None:
    params = SamplingParams(temperature=0, max_tokens=20)
    plain = complete(model.loop(max_rows=1), PROMPTS, params)
    loop = model.loop(draft=draft, max_rows=4)
    for number, tokens in enumerate(PROMPTS):
        loop.submit(Submit(id=str(number), tokens=tokens, params=params))
    deltas: list[Delta] = []
    for turn in range(9):
        deltas += loop.turn()
        if turn == 5:
            loop.executor.reset()
            loop.scheduler.executor_reset(loop.clock.now())
    deltas += drain(loop)
    for id, expected in plain.items():
        assert tokens_of([delta for delta in deltas if delta.id == id]) == tokens_of(expected)


def test_rejection_gives_every_row_an_answer_of_its_length(model: TinyModel, draft: TinyModel) -> None:
    for fields in ({}, {"presence_penalty": 1.0, "logprobs": 1, "top_k": 5}, {"n": 2, "min_p": 0.1}):
        params = SamplingParams(**{"seed": 1, "max_tokens": 20, **fields})
        totals = Totals()
        loop = model.loop(draft=draft, mode="rejection", log=EventLog(totals))
        for _, reports, finish in said(complete(loop, PROMPTS[:4], params), params.n).values():
            assert finish is not None and finish.reason == "length" and len(reports) in (0, 20)
        assert totals.accepted_tokens > totals.drafted_tokens / 5


# -- what it keeps of its cache ----------------------------------------------------------------------------------------


def plan_of(id: str, tokens: tuple[int, ...], blocks: tuple[int, ...], start: int = 0, **more: Any) -> StepPlan:
    params = SamplingParams(temperature=0, seed=0)
    init = RowInit(id, tokens, len(tokens), params, blocks=(blocks,))
    return StepPlan(0, (init,), (Work(id, start, len(tokens) - start, logits=1, sample=True),), **more)


@pytest.fixture
def proposer(model: TinyModel) -> ModelProposer:
    twin, limits = TinyModel(NativeBackend(threads=1)), model.loop(proposer=None).scheduler.limits
    limits = type(limits)(**{name: getattr(limits, name) for name in limits.__struct_fields__} | {"max_drafts": 40})
    return ModelProposer(twin.backend, twin._forward, twin.groups, limits, 0, 128)


def test_it_promises_what_it_says_when_the_next_step_begins(model: TinyModel, proposer: ModelProposer) -> None:
    prompt = PROMPTS[3]
    answer = tokens_of(complete(model.loop(), [prompt], SamplingParams(temperature=0, max_tokens=6))["0"])
    proposer.step(plan_of("a", prompt, tuple(range(20))))
    offer = proposer.propose([("a", [*prompt, answer[0]])], 4)["a"]
    assert offer.tokens == (UNKNOWN,) * 4
    said = proposer.step(StepPlan(1, work=(Work("a", len(prompt), 5, (UNKNOWN,) * 4, logits=5, sample=True),)))
    assert said["a"].tokens == tuple(answer[1:5]) and said["a"].q is None


def test_a_row_that_was_not_followed_drafts_once_it_is(proposer: ModelProposer) -> None:
    prompt = tuple(int(token) for token in np.random.default_rng(0).integers(0, VOCAB, 100))
    proposer.step(plan_of("a", prompt, tuple(range(30)), keep_up=False))
    assert not proposer.propose([("a", [*prompt, 1])], 4), "none of its prompt is computed"
    steps = 0
    while "a" not in proposer.propose([("a", [*prompt, 1])], 4):
        proposer.step(StepPlan(1, work=(Work("a", len(prompt), 1, logits=1, sample=True),)))
        steps += 1
    assert 0 < steps <= -(-(len(prompt) - LAG) // 16)


def test_blocks_that_another_row_filled_are_not_filled_again(proposer: ModelProposer) -> None:
    prompt = tuple(int(token) for token in np.random.default_rng(0).integers(0, VOCAB, 90))
    proposer.step(plan_of("a", prompt, tuple(range(23))))
    proposer.step(plan_of("b", (*prompt, 5, 6), (*range(20), 30, 31, 32), start=80, keep_up=False))
    assert "b" in proposer.propose([("b", [*prompt, 5, 6, 7])], 4), "it lags by the part of its own alone"
    proposer.step(plan_of("c", (*prompt, 5, 6), (40, *range(1, 20), 50, 51, 52), start=0, keep_up=False))
    assert "c" not in proposer.propose([("c", [*prompt, 5, 6, 7])], 4), "its blocks were handed out anew"


def test_nothing_is_promised_beyond_its_context(proposer: ModelProposer) -> None:
    prompt = (1,) * 120
    proposer.step(plan_of("a", prompt, tuple(range(40))))
    assert "a" in proposer.propose([("a", [*prompt, 1])], 7)
    assert "a" not in proposer.propose([("a", [*prompt, 1, 1])], 7)
