"""Verification: what comes without drafts, to the bit; or what the model's distribution says, by chi-square."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.thinking import Thinking
from headway.sampling.logits import summarise
from headway.sampling.pipeline import distribution
from headway.sampling.rows import RowState
from headway.sampling.sampler import Sampler
from headway.sampling.verifier import Drafted, Verified, Verifier
from headway.sampling.verify import MODES, race, reject
from tests.sampling.drawing import REFERENCE, follows, row, sample

VOCAB = 12
FIELDS = [
    {}, {"temperature": 0.0}, {"top_k": 4}, {"presence_penalty": 2.0, "repetition_penalty": 1.3},
    {"logprobs": 2}, {"logprobs": 0, "frequency_penalty": 1.0}, {"logit_bias": ((3, 5.0),)},
    {"min_tokens": 3, "stop": (0, 1, 2)}, {"stop": (4,)}, {"allowed_token_ids": (1, 5, 7)},
    {"bad_token_ids": ((3, 4), (5,))}, {"thinking": Thinking(end=(9,), forced=(8, 9), budget=2)},
]  # fmt: skip


def random_logits(seed: int, rows: int, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, vocab)).astype(np.float32)


def verify(
    logits: np.ndarray, rows: list[RowState], drafts: list[tuple[int, ...]], mode: str = "coupled", position: int = 2
) -> Verified:
    """Rows whose logits stand one after another, each with one draw per draft and one more."""
    sampler = Sampler(len(rows), REFERENCE)
    for slot, state in enumerate(rows):
        sampler.add(slot, state)
    counts = [len(draft) + 1 for draft in drafts]
    last = np.cumsum(counts, dtype=np.int32) - 1
    positions = np.array([position + count - 1 for count in counts], np.int32)
    summary = summarise(logits)
    before = summary.rows.copy()
    slots = np.arange(len(rows), dtype=np.int32)
    verified = Verifier(sampler, REFERENCE, mode).verify(
        summary, slots, last, positions, [Drafted(draft) for draft in drafts]
    )
    np.testing.assert_array_equal(summary.rows, before)
    return verified


def without_drafts(logits: np.ndarray, state: RowState, ends: tuple[int, ...] = ()) -> tuple[list[int], list]:
    """One token per row of logits, one after another, until one ends the row; and their log probabilities."""
    tokens, reports = [], []
    for offset in range(len(logits)):
        drawn = sample(logits[offset : offset + 1], [state], [2 + offset])
        tokens.append(drawn.tokens[0])
        reports += drawn.logprobs.values()
        if tokens[-1] in ends:
            break
    return tokens, reports


ASKED = st.tuples(st.integers(0, 5), st.integers(0, 3), st.sampled_from(FIELDS))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 50), st.lists(ASKED, min_size=1, max_size=4))
def test_coupled_emits_what_would_be_drawn_without_drafts(seed: int, asked: list[tuple[int, int, dict]]) -> None:
    rows, drafts, parts, expected = [], [], [], []
    for number, (right, wrong, fields) in enumerate(asked):
        ends = fields.get("stop", ())
        logits = random_logits(seed + number, right + wrong + 1)
        plain, reports = without_drafts(logits, row(seed=seed, **fields), ends)
        drafts.append((*plain[:right], *[(token + 1) % VOCAB for token in plain[right : right + wrong]]))
        drafts[-1] = (*drafts[-1], *[0] * (right + wrong - len(drafts[-1])))  # the row has ended before
        rows.append(row(seed=seed, **fields))
        parts.append(logits)
        expected.append((plain[: right + 1], reports[: right + 1]))
    verified = verify(np.concatenate(parts), rows, drafts)
    assert not verified.failed
    for entry, (tokens, reports) in enumerate(expected):
        kept = len(verified.tokens[entry])
        assert verified.tokens[entry] == tokens[:kept] and kept == len(tokens)
        assert verified.logprobs.get(entry, []) == reports
    again = row(seed=seed, presence_penalty=1.0)
    told = verify(parts[0], [again], [drafts[0]]).tokens[0]
    assert again.output is not None and sorted(again.output.ids.tolist()) == sorted(set(told))


def test_a_failing_position_ends_the_drafts_and_fails_the_row_in_the_next_step() -> None:
    logits = random_logits(0, rows=2)
    logits[1, 0] = np.nan
    (first,) = sample(logits[:1], [row()], [2]).tokens
    for fields in ({}, {"presence_penalty": 1.0}):
        (first,) = sample(logits[:1], [row(**fields)], [2]).tokens
        verified = verify(logits, [row(**fields)], [(first,)])
        assert verified.tokens == [[first]] and not verified.failed
        verified = verify(logits[1:], [row(**fields)], [()], position=3)
        assert verified.tokens == [[]] and "not finite" in verified.failed[0]


def test_accept_all_takes_every_draft_of_rows_that_nothing_binds() -> None:
    logits = random_logits(1, rows=6)
    bound = {"allowed_token_ids": (1, 5)}
    verified = verify(logits, [row(), row(**bound)], [(7, 8), (7, 8)], "accept-all")
    assert verified.tokens[0][:2] == [7, 8] and len(verified.tokens[0]) == 3
    assert verified.tokens[1] == without_drafts(logits[3:4], row(**bound))[0]


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 0.0, "presence_penalty": 1.0, "logprobs": 1}])
def test_rejection_of_a_greedy_row_is_the_same_as_coupled(fields: dict) -> None:
    for seed in range(20):
        logits = random_logits(seed, rows=4)
        draft = (*without_drafts(logits, row(**fields))[0][:2], seed % VOCAB)
        told = [verify(logits, [row(**fields)], [draft], mode) for mode in MODES[:2]]
        assert told[0] == told[1]


# -- the distribution of what is emitted -------------------------------------------------------------------------------

DRAWS = 100_000


def synthetic(kind: str, rng: np.random.Generator, shape: tuple[int, ...], vocab: int) -> tuple[np.ndarray, np.ndarray]:
    p, q = (rng.dirichlet(np.ones(vocab), shape) for _ in range(2))
    if kind == "equal":
        q = p.copy()
    if kind == "disjoint":
        half = np.arange(vocab) < vocab // 2
        p, q = p * half, q * ~half
    if kind == "sharp":
        p, q = p**4, q**4
    return p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)


def rejected(
    rng: np.random.Generator, p: np.ndarray, q: np.ndarray, draft: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    rows, k = draft.shape
    noise = rng.uniform(np.finfo(float).tiny, 1, (rows, k + 1, p.shape[-1]))
    return reject(p, q, draft, rng.uniform(size=(rows, k)), noise)


@pytest.mark.parametrize("kind", ["random", "equal", "disjoint", "sharp"])
@pytest.mark.parametrize("k", range(1, 9))
def test_rejection_emits_tokens_of_the_models_distribution(kind: str, k: int) -> None:
    """Positions are independent here, so each emitted one must follow its own p: the first, and the joint of two."""
    rng = np.random.default_rng([k, len(kind)])
    vocab = 6
    p, q = synthetic(kind, rng, (k + 1,), vocab)
    q = q[:k]
    whole = np.broadcast_to(p, (DRAWS, k + 1, vocab)), np.broadcast_to(q, (DRAWS, k, vocab))
    draft = race(whole[1], rng.uniform(np.finfo(float).tiny, 1, (DRAWS, k, vocab)))
    accepted, token = rejected(rng, *whole, draft)
    emitted = np.concatenate((draft, np.zeros((DRAWS, 1), int)), axis=1)
    emitted[np.arange(DRAWS), accepted] = token
    follows(np.bincount(emitted[:, 0], minlength=vocab), p[0])
    two = emitted[accepted >= 1]  # of the others the next step draws the second, from p[1]
    if len(two) < 1000:
        return
    first = np.bincount(two[:, 0], minlength=vocab)
    joint = np.bincount(two[:, 0] * vocab + two[:, 1], minlength=vocab**2)
    follows(joint, (first[:, None] / first.sum() * p[1]).reshape(-1))
    overlap = np.minimum(p[:k], q).sum(-1)
    shares = np.cumprod(np.append(1.0, overlap))
    follows(np.bincount(accepted, minlength=k + 1), shares - np.append(shares[1:], 0.0))


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.8}, {"top_k": 3, "temperature": 1.7}])
def test_rejection_of_a_certain_draft_follows_the_models_distribution(fields: dict) -> None:
    """Through the verifier, with keyed noise: one seed per draw."""
    logits = random_logits(3, rows=2, vocab=6)
    p = distribution(logits[0], row(**fields), 2)
    draft = int(np.argsort(p)[-2])
    counts = np.zeros(6)
    for seed in range(1500):
        counts[verify(logits, [row(seed=seed, **fields)], [(draft,)], "rejection").tokens[0][0]] += 1
    follows(counts, p)
