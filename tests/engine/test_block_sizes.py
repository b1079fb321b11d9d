"""On the native backend the size of a cache block is not part of the answer, or it is refused."""

from __future__ import annotations

import pytest

from headway import LLM, SamplingParams
from headway.core.errors import BadInput
from headway.engine.build import STABLE_BLOCKS
from headway.ops import native

TEXT = "The history of the sea is long and holds many stories about ships and storms. " * 25  # over 256 tokens
REPORTED = SamplingParams(temperature=0, max_tokens=6, logprobs=2)


@pytest.mark.skipif(native.why_not() is not None, reason="needs the native kernels")
def test_accepted_sizes_answer_alike_to_the_bit() -> None:
    answers = set()
    for size in STABLE_BLOCKS:
        with LLM(block_size=size, max_model_len=1024, max_rows=2, kv_cache_gib=0.1, deterministic=True) as llm:
            answers.add(repr(llm.generate(TEXT, REPORTED)[0].choices[0].logprobs))
    assert len(answers) == 1


@pytest.mark.skipif(native.why_not() is not None, reason="needs the native kernels")
@pytest.mark.parametrize("size", [1, 8, 16, 24, 40, 48, 96, 512])
def test_other_sizes_are_refused_where_answers_must_not_change(size: int) -> None:
    with pytest.raises(BadInput, match=rf"--block-size: with {size}, .* accepts 32, 64, 128, 256"):
        LLM(block_size=size, deterministic=True)
