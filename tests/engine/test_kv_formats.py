"""A cache of 8-bit numbers: nearly twice the tokens in the same memory, and the same bits however a prompt comes."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway import LLM, SamplingParams
from headway.core.errors import BadInput
from headway.ops import native
from tests.serve.conftest import write_tiny_checkpoint

needs_native = pytest.mark.skipif(native.why_not() is not None, reason="needs the native kernels")
TOKENS = [number * 37 % 150 + 3 for number in range(400)]
REPORTED = SamplingParams(temperature=0, max_tokens=6, logprobs=2)


def answer(llm: LLM, tokens: list[int]) -> str:
    return repr(llm.generate(tokens, REPORTED)[0].choices[0].logprobs)


@needs_native
def test_it_holds_as_many_more_tokens_as_the_plan_says(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    blocks = {}
    for kv in ("f32", "bf16", "int8"):
        with LLM(tmp_path, kv=kv, kv_cache_gib=0.01, max_rows=2) as llm:
            blocks[kv] = llm.engine.memory.blocks[0]
    assert blocks["bf16"] / blocks["f32"] == pytest.approx(2, rel=0.1)
    assert blocks["int8"] / blocks["bf16"] == pytest.approx(
        2 * 16 / (16 + 2), rel=0.1
    )  # heads of 16 numbers and a scale


@needs_native
def test_answers_are_the_same_cold_warm_chunked_and_beside_others(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    with LLM(tmp_path, kv="int8", kv_cache_gib=0.1) as llm:
        cold, warm = answer(llm, TOKENS), answer(llm, TOKENS)
        both = llm.generate([TOKENS, TOKENS[::-1]], REPORTED)
    with LLM(tmp_path, kv="int8", kv_cache_gib=0.1, max_step_tokens=32, step_ms=1000) as llm:
        chunked = answer(llm, TOKENS)
    assert cold == warm == chunked == repr(both[0].choices[0].logprobs)
    with LLM(tmp_path, kv_cache_gib=0.1) as llm:
        assert answer(llm, TOKENS) != cold  # it is another cache


def test_a_backend_that_has_no_such_cache_says_which_it_has() -> None:
    with pytest.raises(BadInput, match="--kv: 'int8': the reference backend's cache holds f32"):
        LLM(backend="reference", kv="int8")
