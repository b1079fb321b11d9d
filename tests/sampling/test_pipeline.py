"""The sampling pipeline against its specification, against transformers, and against the distribution it claims."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import BadInput
from headway.core.request import SamplingParams
from headway.sampling.adjust import adjust
from headway.sampling.noise import dense_uniforms
from headway.sampling.pipeline import Survivors, draw, keep_min_p, keep_top_p, truncate
from headway.sampling.rows import TokenCounts, check_params
from headway.sampling.select import largest
from tests.sampling.drawing import chi_square, row, sample

VOCAB = 97


def logits_of(*probabilities: float) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities, np.float32))


def random_logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, vocab)) * 3).astype(np.float32)


def kept(survivors: Survivors) -> list[int]:
    return list(range(len(survivors.weights))) if survivors.ids is None else sorted(survivors.ids.tolist())


# -- stages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 1000}, [0, 1, 2, 3]),
        ({"top_p": 0.35}, [0]),
        ({"top_p": 0.41}, [0, 1]),
        ({"top_p": 0.95}, [0, 1, 2, 3]),
        ({"min_p": 0.6}, [0, 1]),
        ({"min_p": 1.0}, [0]),
        # The worked example. After top_k=3 the masses are 4/9, 3/9, 2/9; 0.75 is reached by the first two (7/9).
        # Measured on the whole distribution it would take three: 0.4 + 0.3 = 0.7 < 0.75.
        ({"top_k": 3, "top_p": 0.75}, [0, 1]),
        ({"top_k": 3, "top_p": 0.75, "min_p": 0.8}, [0]),
    ],
)
def test_what_survives_of_40_30_20_10_percent(fields: dict, expected: list[int]) -> None:
    assert kept(truncate(logits_of(0.4, 0.3, 0.2, 0.1), SamplingParams(**fields))) == expected


def test_temperature_comes_before_truncation() -> None:
    # At temperature 0.5 the masses are 16 : 9 : 4 : 1 (of 30), so 0.8 is reached by two tokens, not three.
    assert kept(truncate(logits_of(0.4, 0.3, 0.2, 0.1), SamplingParams(temperature=0.5, top_p=0.8))) == [0, 1]


@pytest.mark.parametrize("fields", [{"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.0}, {"top_k": 2, "top_p": 0.9}])
def test_ties_go_to_the_lowest_ids(fields: dict) -> None:
    logits = np.zeros(4, np.float32)
    if fields.get("temperature") == 0.0:
        assert draw(logits, row(**fields), 2) == 0
    else:
        assert kept(truncate(logits, SamplingParams(**fields))) == [0, 1]


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=3000), st.integers(0, 3100))
def test_largest_is_a_stable_sort_cut_short(values: list[int], count: int) -> None:
    array = np.array(values, np.float32)
    assert largest(array, count).tolist() == np.argsort(-array, kind="stable")[:count].tolist()


@pytest.mark.parametrize("count", [1, 20, 500, 5000])
def test_largest_on_a_vocabulary(count: int) -> None:
    array = random_logits(3, vocab=49_152)[0]
    array[::7] = -np.inf
    assert largest(array, count).tolist() == np.argsort(-array, kind="stable")[:count].tolist()


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999, 1e-9])
def test_nucleus_of_a_flat_distribution_is_found_beyond_the_first_guess(top_p: float) -> None:
    weights = np.exp(random_logits(5, vocab=49_152)[0] / 6)
    weights /= weights.max()
    order = np.argsort(-weights, kind="stable")
    mass = np.cumsum(weights[order], dtype=np.float64) / weights.sum(dtype=np.float64)
    expected = order[: int(np.argmax(mass >= top_p)) + 1]
    assert kept(keep_top_p(Survivors(None, weights), top_p)) == sorted(expected.tolist())
    assert kept(keep_min_p(Survivors(None, weights), 0.5)) == np.flatnonzero(weights >= 0.5).tolist()


def test_penalties_count_prompt_and_output_as_they_should() -> None:
    logits = np.array([2.0, -2.0, 4.0, 1.0], np.float32)
    state = row(
        tokens=(0, 1, 1, 2, 2), prompt_len=2, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25
    )
    # Token 0 is only in the prompt: repetition alone. Token 1 is negative: multiplied, then once generated.
    assert adjust(logits, state, 5).tolist() == [1.0, -4.0 - 0.75, 2.0 - 1.25, 1.0]
    state.observe(3)
    assert adjust(logits, state, 6).tolist() == [1.0, -4.75, 0.75, 0.5 - 0.75]


def test_bias_is_added_after_the_penalties() -> None:
    state = row(tokens=(0,), prompt_len=1, repetition_penalty=2.0, logit_bias=((0, -3.0), (1, 100.0)))
    assert adjust(np.array([2.0, 1.0], np.float32), state, 1).tolist() == [-2.0, 101.0]


def test_stop_ids_are_masked_until_min_tokens_are_generated() -> None:
    logits = np.array([0.0, 5.0, 1.0], np.float32)
    state = row(tokens=(0, 0), prompt_len=2, stop=(1,), min_tokens=2, temperature=0.0)
    assert [draw(logits, state, position) for position in (2, 3, 4)] == [2, 2, 1]


def test_untouched_logits_are_not_copied() -> None:
    logits = random_logits(0)[0]
    assert adjust(logits, row(top_k=5, temperature=0.3), 2) is logits


def test_raw_logits_are_never_written_to() -> None:
    logits = random_logits(0)
    before = logits.copy()
    sample(logits, [row(repetition_penalty=1.5, logit_bias=((3, 2.0),), top_p=0.9, logprobs=3)], [2])
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("temperature", [1e-300, 1e-45, 1e-30, 1e-6])
def test_a_tiny_temperature_is_greedy_without_overflow(temperature: float) -> None:
    logits = random_logits(0)[0]
    assert draw(logits, row(temperature=temperature), 2) == int(np.argmax(logits))


def test_bias_alone_forces_a_token() -> None:
    assert draw(random_logits(1)[0] / 10, row(logit_bias=((17, 100.0),)), 2) == 17


def test_token_ids_beyond_the_vocabulary_are_refused() -> None:
    check_params(SamplingParams(logit_bias=((96, 1.0),), stop_token_ids=(96,)), VOCAB)
    with pytest.raises(BadInput, match="logit_bias: token id 97 is not below"):
        check_params(SamplingParams(logit_bias=((97, 1.0),)), VOCAB)
    with pytest.raises(BadInput, match="stop_token_ids: token id 1000"):
        check_params(SamplingParams(stop_token_ids=(1000,)), VOCAB)
    with pytest.raises(BadInput, match="twice"):
        check_params(SamplingParams(logit_bias=((1, 1.0), (1, 2.0))), VOCAB)


# -- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [(np.nan, "not finite"), (np.inf, "not finite"), (-np.inf, "no token is allowed")],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_fails_alone(bad: float, sentence: str, temperature: float) -> None:
    logits = random_logits(2, rows=3)
    if bad == -np.inf:
        logits[1] = bad
    else:
        logits[1, 40] = bad
    result = sample(logits, [row(temperature=temperature) for _ in range(3)], [2, 2, 2])
    alone = sample(logits[[0, 2]], [row(temperature=temperature) for _ in range(2)], [2, 2])
    assert sentence in result.failed.pop(1)
    assert not result.failed
    assert [result.tokens[0], result.tokens[2]] == alone.tokens


def test_a_row_that_is_not_finite_fails_before_its_token_counts() -> None:
    logits = random_logits(0)
    logits[0, 5] = np.nan  # masked, so a token could be drawn, but the model's distribution does not exist
    state = row(stop=(5,), min_tokens=3, logprobs=1, presence_penalty=1.0)
    result = sample(logits, [state], [2])
    assert result.tokens[0] < 0
    assert not result.logprobs
    assert "not finite" in result.failed[0]
    assert state.output is not None and not len(state.output.ids)


def test_a_row_whose_every_token_is_masked_says_so() -> None:
    state = row(stop=tuple(range(VOCAB)), min_tokens=3)
    assert "no token is allowed at position 2" in sample(random_logits(0), [state], [2]).failed[0]


@given(st.lists(st.integers(0, 40)), st.lists(st.integers(0, 40)))
def test_counts_equal_a_recount(before: list[int], after: list[int]) -> None:
    counts = TokenCounts(before)
    for token in after:
        counts.add(token)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == Counter(before + after)


def test_minus_infinity_is_a_mask_not_a_fault() -> None:
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[5] = -80.0
    for fields in ({}, {"temperature": 0.0}, {"top_k": 10}, {"top_p": 0.5}, {"min_p": 0.1}):
        assert draw(logits, row(**fields), 2) == 5


# -- parity with transformers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_distribution_equals_transformers_warpers(seed: int) -> None:
    torch = pytest.importorskip("torch")
    warpers = pytest.importorskip("transformers.generation.logits_process")
    rng = np.random.default_rng(seed)
    logits = random_logits(seed, vocab=1000)[0]
    context = tuple(int(token) for token in rng.integers(0, 1000, 50))
    fields = {
        "temperature": float(rng.uniform(0.3, 2)),
        "top_k": int(rng.integers(2, 200)),
        "top_p": float(rng.uniform(0.3, 0.99)),
        "min_p": float(rng.uniform(0.001, 0.2)),
        "repetition_penalty": float(rng.uniform(0.7, 1.6)),
    }
    scores = torch.tensor(logits)[None]
    for warper in (
        warpers.RepetitionPenaltyLogitsProcessor(fields["repetition_penalty"]),
        warpers.TemperatureLogitsWarper(fields["temperature"]),
        warpers.TopKLogitsWarper(fields["top_k"]),
        warpers.TopPLogitsWarper(fields["top_p"]),
        warpers.MinPLogitsWarper(fields["min_p"]),
    ):
        scores = warper(torch.tensor([context]), scores)
    expected = torch.softmax(scores.double(), -1)[0].numpy()

    state = row(tokens=context, prompt_len=50, **fields)
    survivors = truncate(adjust(logits, state, 50), state.params)
    ours = np.zeros(1000)
    ours[survivors.ids] = survivors.weights / survivors.weights.sum()
    np.testing.assert_allclose(ours, expected, atol=1e-6)


# -- draws -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.6}, {"top_k": 12}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 30, "top_p": 0.8}]
)
@pytest.mark.parametrize("vary", ["position", "seed", "choice"])
def test_draws_follow_the_distribution(fields: dict, vary: str) -> None:
    logits = random_logits(9)[0]
    survivors = truncate(logits, SamplingParams(**fields))
    probabilities = np.zeros(VOCAB)
    probabilities[slice(None) if survivors.ids is None else survivors.ids] = survivors.weights / survivors.weights.sum()
    counts = np.zeros(VOCAB)
    for index in range(4000):
        key = {"position": 7, "seed": 5, "choice": 0, vary: index}
        counts[draw(logits, row(choice=key["choice"], seed=key["seed"], **fields), key["position"])] += 1
    statistic, freedom = chi_square(counts, probabilities)
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


@given(st.permutations(range(8)), st.sampled_from([{}, {"top_k": 5}, {"top_p": 0.7, "presence_penalty": 1.0}]))
def test_neighbours_and_order_do_not_matter(order: list[int], fields: dict) -> None:
    logits = random_logits(4, rows=8)
    alone = [sample(logits[i : i + 1], [row(seed=i % 3, choice=i, **fields)], [2 + i]).tokens[0] for i in range(8)]
    together = sample(logits[order], [row(seed=i % 3, choice=i, **fields) for i in order], [2 + i for i in order])
    assert together.tokens == [alone[i] for i in order]


def test_same_key_same_token_and_choices_differ() -> None:
    logits = np.zeros(1000, np.float32)
    draws = [[draw(logits, row(choice=choice, seed=3), position) for position in range(6)] for choice in (0, 1, 2, 0)]
    assert draws[0] == draws[3]
    assert len({tuple(one) for one in draws}) == 3


def test_truncation_does_not_change_the_noise_of_the_tokens_it_keeps() -> None:
    """The race is run over the survivors' own noise: if the untruncated winner survives, it still wins."""
    logits = random_logits(6)[0]
    for position in range(200):
        winner = draw(logits, row(), position)
        if winner in largest(logits, 20):
            assert draw(logits, row(top_k=20), position) == winner


def test_the_winner_is_the_first_to_finish() -> None:
    logits = random_logits(8)[0]
    times = -np.log(dense_uniforms(VOCAB, seed=1, choice=0, position=9)) / np.exp(logits.astype(np.float64))
    assert draw(logits, row(), 9) == int(np.argmin(times))
