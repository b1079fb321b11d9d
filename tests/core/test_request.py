"""What sampling parameters accept: every field of the wrong kind or out of range is one sentence that names it."""

from __future__ import annotations

from typing import Any

import pytest

from headway.core.errors import BadInput
from headway.core.grammar import Grammar
from headway.core.request import SamplingParams


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens: 0 is not an integer >= 1"),
        ({"max_tokens": 1.0}, "max_tokens: 1.0 is not an integer >= 1"),
        ({"max_tokens": 3, "min_tokens": 5}, "min_tokens: 5 is not an integer from 0 to 3"),
        ({"temperature": "0"}, "temperature: '0' is not a number from 0 to 100"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"top_p": -0.1}, "top_p: -0.1 is not a number from 0 to 1"),
        ({"n": True}, "n: True is not an integer from 1 to 128"),
        ({"seed": 2**64}, "seed: "),
        ({"stop": "a"}, "stop: give a list"),
        ({"stop": 5}, "stop: give a list"),
        ({"stop": None}, "stop: give a list"),
        ({"stop": ["a", ""]}, "stop: each stop string must have 1 to"),
        ({"stop_token_ids": 5}, "stop_token_ids: 5 is not a list of token ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids: -1 is not an integer >= 0"),
        ({"logit_bias": {5: 1.0}}, r"logit_bias: {5: 1.0} is not a list of \(token id, bias\) pairs"),
        ({"logit_bias": [(5,)]}, r"logit_bias: \(5,\) is not a \(token id, bias\) pair"),
        ({"logit_bias": [(5, 101)]}, "logit_bias: 101 is not a number from -100 to 100"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty: 1e-300 is not a number from 0.01 to 100"),
        ({"ignore_eos": "no"}, "ignore_eos: 'no' is neither True nor False"),
        ({"grammar": "x"}, "grammar: 'x' is no Grammar"),
        ({"grammar": Grammar.regex("a"), "ignore_eos": True}, "ignore_eos: not together with a grammar"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        SamplingParams(**fields)


def test_lists_are_as_good_as_tuples() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[5], logit_bias=[[5, 1]])  # type: ignore[arg-type]
    assert params.logit_bias[0][0] == 5
