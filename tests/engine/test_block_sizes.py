"""On the native backend the size of a cache block is not part of the answer, or it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway import LLM, SamplingParams
from headway.core.errors import BadInput
from headway.engine.backends import STABLE_BLOCKS
from headway.ops import native
from tests.serve.conftest import write_tiny_checkpoint

TOKENS = [number * 37 % 150 + 3 for number in range(600)]  # more than two of the largest blocks
REPORTED = SamplingParams(temperature=0, max_tokens=6, logprobs=2)


@pytest.mark.skipif(native.why_not() is not None, reason="needs the native kernels")
def test_accepted_sizes_answer_alike_to_the_bit(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    answers = set()
    for size in STABLE_BLOCKS:
        with LLM(tmp_path, block_size=size, max_rows=2, kv_cache_gib=0.1, deterministic=True) as llm:
            answers.add(repr(llm.generate(TOKENS, REPORTED)[0].choices[0].logprobs))
    assert len(answers) == 1


@pytest.mark.skipif(native.why_not() is not None, reason="needs the native kernels")
@pytest.mark.parametrize("size", [1, 8, 16, 24, 40, 48, 96, 512])
def test_other_sizes_are_refused_where_answers_must_not_change(size: int) -> None:
    with pytest.raises(BadInput, match=rf"--block-size: with {size}, .* accepts 32, 64, 128, 256"):
        LLM(block_size=size, deterministic=True)
