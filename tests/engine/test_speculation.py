"""Answers with drafts are those without, to the bit: tokens and log probabilities, whatever is proposed, under every
sampling parameter, calm, crowded, chunked, preempted and cancelled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from headway.core.events import EventLog, Preempted
from headway.core.folds import Totals
from headway.core.request import SamplingParams
from headway.core.step import StepPlan
from headway.core.thinking import Thinking
from headway.engine.messages import Cancel, Delta, Submit
from headway.ops import native
from headway.ops.native.backend import NativeBackend
from headway.roofline.fixed import FixedCosts
from headway.sampling.verify import race, reject
from headway.scheduling.budget import Budget
from headway.scheduling.invariants import check
from headway.scheduling.policies import policy_named
from headway.speculation.ngram import NgramProposer
from headway.speculation.proposer import LONGEST, Proposal
from tests.engine.tiny import VOCAB, TinyModel, complete, drain, prompts, tokens_of
from tests.sampling.drawing import follows

PROMPTS = prompts(16)
FIELDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.9, "top_k": 40, "min_p": 0.01},
    {"temperature": 0.8, "top_p": 0.8, "logprobs": 2, "n": 3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "temperature": 0.7},
    {"logit_bias": ((7, 3.0), (9, -100.0)), "logprobs": 0},
    {"min_tokens": 8, "stop_token_ids": tuple(range(0, VOCAB, 4))},
    {"stop_token_ids": tuple(range(0, VOCAB, 6)), "allowed_token_ids": tuple(range(0, VOCAB, 3))},
    {"bad_token_ids": ((1, 2), (3,), (5, 6, 7)), "temperature": 2.0},
    {"thinking": Thinking(end=(9,), forced=(8, 9), budget=4)},
    {"prompt_logprobs": 1, "logprobs": 1},
]


class Oracle:
    """Knows every answer, and proposes it: right, with a mistake somewhere, or nothing."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], seed: int = 0) -> None:
        self._answers = answers
        self._rng = np.random.default_rng(seed)
        self._rows: dict[str, tuple[int, list[int]]] = {}

    def step(self, plan: StepPlan) -> dict[str, Proposal]:
        for id in plan.gone:
            self._rows.pop(id, None)
        for row in plan.new:
            self._rows[row.id] = row.prompt_len, self._answers[*row.tokens[: row.prompt_len], row.choice]
        return {}

    def reset(self) -> None:
        self._rows.clear()

    def propose(self, rows: Iterable[tuple[str, Sequence[int]]], most: int) -> dict[str, Proposal]:
        made = {}
        for id, tokens in rows:
            prompt, answer = self._rows[id]
            draft = answer[len(tokens) - prompt :][: self._rng.integers(0, most + 1)]
            if draft and self._rng.random() < 0.5:
                draft[self._rng.integers(len(draft))] = int(self._rng.integers(VOCAB))
            if draft:
                made[id] = Proposal(tuple(draft), 0.5)
        return made


@pytest.fixture(
    scope="module",
    params=["reference", pytest.param("native", marks=pytest.mark.skipif(bool(native.why_not()), reason="no kernels"))],
)
def model(request: pytest.FixtureRequest) -> TinyModel:
    return TinyModel(NativeBackend(threads=2) if request.param == "native" else None)


def said(run: dict[str, list[Delta]], choices: int) -> dict[tuple[str, int], tuple[Any, ...]]:
    """Per choice: all that a client learns, but for the steps it came in."""
    return {
        (id, choice): (
            tokens_of(own := [delta for delta in deltas if delta.choice == choice]),
            [one for delta in own for one in delta.logprobs], own[-1].finish,
        )
        for id, deltas in run.items() for choice in range(choices)
    }  # fmt: skip


def same(run: dict, plain: dict, exact: bool) -> None:
    """Sums of numpy's linear algebra depend on a step's shape, so there log probabilities are near, and the two best
    may change places where they are nearer."""
    if exact:
        assert run == plain
        return
    parted = 0
    for key, (tokens, reports, finish) in run.items():
        if (tokens, finish) != (plain[key][0], plain[key][2]):
            parted += 1
            continue
        ours, theirs = ([one.logprob for one in reports] for reports in (reports, plain[key][1]))
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert parted <= 1


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: " ".join(fields))
def test_answers_are_the_same_with_drafts(model: TinyModel, fields: dict[str, Any]) -> None:
    if not model.backend.deterministic and fields not in FIELDS[:5:2]:
        pytest.skip("slow, and nothing that the other backend does not show")
    params = SamplingParams(**{"seed": 5, "max_tokens": 14, **fields})
    exact = model.backend.deterministic
    plain = said(complete(model.loop(max_rows=1), PROMPTS, params), params.n)
    answers = {(*PROMPTS[int(id)], choice): told[0] for (id, choice), told in plain.items()}
    totals, events = Totals(), []
    log = EventLog(totals, lambda event: events.append(event) if isinstance(event, Preempted) else None)
    for number, options in enumerate(({}, {"budget": Budget(tokens=7)}, {"blocks": 24 if params.n == 1 else 30})):
        loop = model.loop(proposer=Oracle(answers, number), log=log, **options)  # type: ignore[arg-type]
        same(said(complete(loop, PROMPTS, params), params.n), plain, exact)
        check(loop.scheduler)
        assert all(pool.available == pool.size for pool in loop.scheduler.cache.pools)
    assert totals.accepted_tokens > totals.drafted_tokens / 4
    if "stop_token_ids" not in fields:  # those end early
        assert events and totals.drafted_tokens > 80, "some were preempted"
    same(said(complete(model.loop(proposer=NgramProposer()), PROMPTS, params), params.n), plain, exact)


def test_the_prefix_cache_holds_accepted_tokens_only(model: TinyModel) -> None:
    """Answers of prompts that go on where others ended: they hit what drafts, right and wrong, have passed over."""
    params = SamplingParams(temperature=0, max_tokens=24)
    plain = complete(model.loop(max_rows=1), PROMPTS, params)
    answers = {(*PROMPTS[int(id)], 0): tokens_of(deltas) for id, deltas in plain.items()}
    longer = [(*PROMPTS[int(id)], *tokens_of(deltas)[:20]) for id, deltas in plain.items()]
    answers |= {
        (*tokens, 0): tokens_of(deltas)
        for tokens, deltas in zip(longer, complete(model.loop(max_rows=1), longer, params).values(), strict=True)
    }
    loop = model.loop(blocks=2000, proposer=Oracle(answers))
    complete(loop, PROMPTS, params)
    again = complete(loop, longer, params)
    parted = sum(tokens_of(deltas) != answers[*longer[int(id)], 0] for id, deltas in again.items())
    assert parted <= (0 if model.backend.deterministic else 2)
    assert all(deltas[0].cached >= (len(longer[int(id)]) - 1) // 4 * 4 - 4 for id, deltas in again.items())


@pytest.mark.parametrize("policy", ["prefill-first", "static", "fair"])
def test_drafts_wait_where_a_policy_lets_decodes_wait(model: TinyModel, policy: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=16)
    plain = said(complete(model.loop(max_rows=1), PROMPTS, params), 1)
    answers = {(*PROMPTS[int(id)], 0): told[0] for (id, _), told in plain.items()}
    costs = {"model": FixedCosts(step=1e-3, token=1e-6)} if policy == "fair" else {}
    loop = model.loop(
        proposer=Oracle(answers), policy=policy_named(policy), max_rows=6, budget=Budget(tokens=9), **costs
    )
    same(said(complete(loop, PROMPTS, params), 1), plain, model.backend.deterministic)


def test_cancelled_in_the_middle(model: TinyModel) -> None:
    params = SamplingParams(temperature=0, max_tokens=30)
    plain = complete(model.loop(max_rows=1), PROMPTS, params)
    loop = model.loop(proposer=Oracle({(*PROMPTS[int(id)], 0): tokens_of(deltas) for id, deltas in plain.items()}))
    for number, tokens in enumerate(PROMPTS):
        loop.submit(Submit(id=str(number), tokens=tokens, params=params))
    deltas = []
    for turn in range(6):
        deltas += loop.turn()
        loop.cancel(Cancel(str(turn * 3)))
        check(loop.scheduler)
    deltas += drain(loop)
    assert all(pool.available == pool.size for pool in loop.scheduler.cache.pools)
    for id, expected in plain.items():
        told = tokens_of([delta for delta in deltas if delta.id == id])
        assert told == tokens_of(expected)[: len(told)] or not model.backend.deterministic


def test_a_text_that_repeats_itself_takes_few_steps(model: TinyModel) -> None:
    totals = Totals()
    params = SamplingParams(temperature=0, max_tokens=100, allowed_token_ids=(3,))
    run = said(complete(model.loop(proposer=NgramProposer(), log=EventLog(totals)), PROMPTS[:8], params), 1)
    assert all(tokens == [3] * 100 for tokens, _, _ in run.values())
    assert totals.steps < 50 and totals.accepted_tokens > 400


@pytest.mark.skipif(bool(native.why_not()), reason="no kernels")
@pytest.mark.parametrize("window", [1, 6, 29])
def test_a_model_with_windows(window: int) -> None:
    model = TinyModel(NativeBackend(threads=1), window)
    params = SamplingParams(temperature=0, max_tokens=30, logprobs=1)
    plain = said(complete(model.loop(max_rows=1), PROMPTS, params), 1)
    answers = {(*PROMPTS[int(id)], 0): told[0] for (id, _), told in plain.items()}
    for blocks in (400, 30):
        loop = model.loop(proposer=Oracle(answers), blocks=blocks)
        assert said(complete(loop, PROMPTS, params), 1) == plain
        assert all(pool.available == pool.size for pool in loop.scheduler.cache.pools)


def test_rejection_gives_every_row_an_answer_of_its_length(model: TinyModel) -> None:
    for fields in ({}, {"presence_penalty": 1.0, "logprobs": 1, "top_k": 5}, {"n": 2, "min_p": 0.1}):
        params = SamplingParams(**{"seed": 1, "max_tokens": 20, **fields})
        loop = model.loop(proposer=NgramProposer(), mode="rejection")
        for _, reports, finish in said(complete(loop, PROMPTS[:4], params), params.n).values():
            assert finish is not None and finish.reason == "length" and len(reports) in (0, 20)


def test_no_more_drafts_than_attention_takes_at_once() -> None:
    assert LONGEST + 1 == 8  # FEW_QUERIES of the native attention


# -- the distribution of a real model's answers ------------------------------------------------------------------------

DRAWS, IDS = 100_000, (3, 10, 17, 24, 31)  # the only tokens that may come


def model_says(model: TinyModel, contexts: list[tuple[int, ...]], temperature: float) -> np.ndarray:
    """The distribution of the next token after each context, over `IDS`."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=VOCAB)
    told = complete(model.loop(), contexts, params)
    logprobs = [dict(told[str(number)][0].logprobs[0].top) for number in range(len(contexts))]
    scores = np.array([[one[id] for id in IDS] for one in logprobs]) / temperature
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def test_rejection_follows_a_model_when_another_one_drafts() -> None:
    """Two drafts per step, each depending on the one before: the first token, and the joint of two."""
    model, rng, n = TinyModel(), np.random.default_rng(7), len(IDS)
    prompt = PROMPTS[0]
    contexts = [prompt, *((*prompt, a) for a in IDS), *((*prompt, a, b) for a in IDS for b in IDS)]
    p, q = (model_says(model, contexts, temperature) for temperature in (1.0, 2.5))

    def step(rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Verify k drafts behind contexts `rows` -> (how many were accepted, what is emitted [rows, k + 1])."""

        def noise(*shape: int) -> np.ndarray:
            return rng.uniform(np.finfo(float).tiny, 1, shape)

        at, places, drafts = rows, [rows], []
        for _ in range(k):
            drafts.append(race(q[at], noise(len(rows), n)))
            at = np.where(at == 0, 1 + drafts[-1], 1 + n + (at - 1) * n + drafts[-1])
            places.append(at)
        draft = np.stack(drafts, axis=1)
        accepted, token = reject(
            np.stack([p[one] for one in places], axis=1), np.stack([q[one] for one in places[:-1]], axis=1), draft,
            rng.uniform(size=draft.shape), noise(len(rows), k + 1, n),
        )  # fmt: skip
        emitted = np.concatenate((draft, np.zeros((len(rows), 1), int)), axis=1)
        emitted[np.arange(len(rows)), accepted] = token
        return accepted, emitted

    accepted, emitted = step(np.zeros(DRAWS, int), 2)
    first, second = emitted[:, 0], emitted[:, 1].copy()
    alone = accepted == 0
    second[alone] = step(1 + first[alone], 1)[1][:, 0]
    assert 0.3 < alone.mean() + accepted.mean() < 2 and alone.sum() > 1000, "both ways are taken"
    follows(np.bincount(first, minlength=n), p[0])
    follows(np.bincount(first * n + second, minlength=n * n), (p[0][:, None] * p[1 : 1 + n]).reshape(-1))
