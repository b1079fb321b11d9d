"""Log probabilities are those of the raw distribution, whatever the sampling parameters do to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.request import SamplingParams
from headway.core.step import RowInit
from headway.sampling.logits import summarise
from headway.sampling.logprobs import token_logprobs
from headway.sampling.rows import RowFailure, RowState
from headway.sampling.trace import row_before, trace
from tests.sampling.drawing import sample


def random_logits(seed: int, rows: int, vocab: int = 61) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(rows, vocab)) * 3).astype(np.float32)


def reference(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 40])
def test_values_and_ranks_equal_a_log_softmax(rows: int) -> None:
    logits = random_logits(rows, rows)
    tokens = np.random.default_rng(0).integers(0, 61, rows).tolist()
    expected = reference(logits)
    for row, token, report in zip(expected, tokens, token_logprobs(summarise(logits), tokens, 5), strict=True):
        order = np.argsort(-row, kind="stable")
        assert report.token == token
        assert report.logprob == pytest.approx(row[token], abs=1e-5)
        assert report.rank == order.tolist().index(token) + 1
        assert [one for one, _ in report.top] == order[:5].tolist()
        assert [value for _, value in report.top] == pytest.approx(row[order[:5]].tolist(), abs=1e-5)


@given(st.lists(st.integers(0, 2), min_size=2, max_size=30), st.integers(0, 29), st.integers(0, 40))
def test_rank_is_the_place_in_the_list_even_among_ties(values: list[int], token: int, top: int) -> None:
    token %= len(values)
    (report,) = token_logprobs(summarise(np.array([values], np.float32)), [token], top)
    assert len(report.top) == min(top, len(values))
    assert (report.rank <= top) == (token in [one for one, _ in report.top])
    if report.rank <= top:
        assert report.top[report.rank - 1] == (token, report.logprob)


def test_sampling_parameters_do_not_touch_them() -> None:
    logits = random_logits(1, 1)
    plain = SamplingParams(seed=4, logprobs=3, temperature=0.0)
    shaped = SamplingParams(seed=4, logprobs=3, temperature=0.2, top_k=1, logit_bias=((7, 100.0), (0, -100.0)))
    expected = reference(logits)[0]
    for params in (plain, shaped):
        result = sample(logits, [RowState(RowInit("r", (1,), 1, params))], [1])
        report = result.logprobs[0]
        assert report.token == result.tokens[0]
        assert report.logprob == pytest.approx(expected[report.token], abs=1e-5)
    assert report.token == 7


def test_masked_alternatives_are_minus_infinity_not_nan() -> None:
    logits = np.array([[0.0, -np.inf, -np.inf]], np.float32)
    (report,) = token_logprobs(summarise(logits), [2], 3)
    assert report.logprob == -np.inf
    assert report.top == ((0, 0.0), (1, -np.inf), (2, -np.inf))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers_have_none(bad: float) -> None:
    logits = random_logits(0, 3)
    logits[1, 5] = bad
    with pytest.raises(RowFailure, match="not finite"):
        token_logprobs(summarise(logits), [0, 0, 0], 1)


def test_zero_alternatives_report_the_token_alone() -> None:
    assert token_logprobs(summarise(random_logits(0, 1)), [3], 0)[0].top == ()


# -- the trace of one position -----------------------------------------------------------------------------------------


def test_trace_shows_each_stage_of_40_30_20_10_percent() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    params = SamplingParams(seed=1, top_k=3, top_p=0.75, min_p=0.5)
    result = trace(logits, row_before((1, 2), 2, params), 2)
    shown = {stage.name: stage.probabilities.round(4).tolist() for stage in result.stages}
    assert shown == {
        "model": [0.4, 0.3, 0.2, 0.1],
        "penalties": [0.4, 0.3, 0.2, 0.1],
        "temperature": [0.4, 0.3, 0.2, 0.1],
        "top_k": [0.4444, 0.3333, 0.2222, 0.0],
        "top_p": [0.5714, 0.4286, 0.0, 0.0],
        "min_p": [0.5714, 0.4286, 0.0, 0.0],
    }
    assert [stage.survivors for stage in result.stages] == [4, 4, 4, 3, 2, 2]
    assert [stage.name for stage in result.stages if stage.active] == ["model", "top_k", "top_p", "min_p"]


@given(
    st.integers(0, 1000),
    st.sampled_from([{"temperature": 0.0}, {}, {"top_k": 4, "top_p": 0.8}, {"min_p": 0.2, "presence_penalty": 1.5}]),
)
def test_trace_ends_in_the_token_that_is_sampled(position: int, fields: dict) -> None:
    logits = random_logits(position, 1)
    params = SamplingParams(seed=9, **fields)
    result = trace(logits[0], row_before((1, 5, 5), 1, params), position)
    drawn = sample(logits, [RowState(RowInit("r", (1, 5, 5), 1, params))], [position])
    last = result.stages[-1].probabilities
    assert result.token == drawn.tokens[0]
    assert all(stage.probabilities.sum() == pytest.approx(1.0) for stage in result.stages)
    with np.errstate(divide="ignore"):
        assert int(np.argmin(-np.log(result.uniforms) / last)) == result.token
