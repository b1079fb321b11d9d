"""The built-in model through the whole engine: chat, streams, caching, choices, stops, and its recording replayed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from headway import LLM, SamplingParams
from headway.core.errors import BadInput, Rejected
from headway.simulate.replay import replay

GREEDY = SamplingParams(temperature=0, max_tokens=8)
FACT = "The capital of France is"
LONG = "One two three four five six seven eight nine ten. " * 5


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("events") / "run.jsonl"


@pytest.fixture(scope="module")
def llm(recording: Path) -> Iterator[LLM]:
    with LLM(max_model_len=512, max_rows=4, max_step_tokens=40, kv_cache_gib=0.25, event_log=str(recording)) as llm:
        yield llm


def test_it_knows_the_capital_of_france(llm: LLM) -> None:
    (completion,) = llm.generate(FACT, GREEDY)
    assert completion.text.startswith(" Paris")
    assert completion.prompt_tokens == 5
    assert completion.choices[0].finish.reason == "length"
    assert completion.choices[0].ttft < completion.choices[0].token_times[-1]


def test_a_cache_smaller_than_the_context_bounds_it() -> None:
    with LLM(max_rows=4, kv_cache_gib=0.05) as llm:
        engine = llm.engine
        assert engine.max_model_len == engine.memory.tokens < engine.info.context_length


def test_chat_uses_the_template_and_ends_by_itself(llm: LLM) -> None:
    completion = llm.chat("Hi", SamplingParams(temperature=0, max_tokens=100))
    assert completion.choices[0].finish.reason == "stop"
    assert completion.choices[0].tokens[-1] in llm.engine.tokenizer.eos_ids
    assert "<|im_end|>" not in completion.text


def test_streamed_text_is_the_whole_text(llm: LLM) -> None:
    with llm.stream(FACT, GREEDY) as stream:
        streamed = "".join(delta.text for delta in stream)
    assert streamed == llm.generate(FACT, GREEDY)[0].text


def test_prompts_of_a_batch_answer_as_they_do_alone(llm: LLM) -> None:
    prompts = [FACT, "Water is made of", "def add(a, b):"]
    together = [one.text for one in llm.generate(prompts, GREEDY)]
    assert together == [llm.generate(prompt, GREEDY)[0].text for prompt in prompts]


def test_a_repeated_prompt_comes_from_the_cache(llm: LLM) -> None:
    first, second = (llm.generate(LONG, GREEDY)[0] for _ in range(2))
    assert second.text == first.text
    assert second.cached_tokens == (second.prompt_tokens - 1) // 32 * 32 > 0


def test_choices_share_the_prompt_and_differ_by_their_noise(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=8)
    (first,), (again,) = llm.generate(LONG + "So", params), llm.generate(LONG + "So", params)
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.text for choice in again.choices]


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = llm.generate(FACT, SamplingParams(temperature=0, max_tokens=12))[0].text
    stop = whole[4:7]
    (completion,) = llm.generate(FACT, SamplingParams(temperature=0, max_tokens=12, stop=(stop,)))
    assert completion.text == whole[: whole.index(stop)]
    assert completion.choices[0].finish.matched == stop


def test_logprobs_are_of_the_raw_distribution(llm: LLM) -> None:
    plain = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=1)
    biased = SamplingParams(temperature=0, max_tokens=1, logprobs=2, logit_bias=((30, 100.0),))
    (completion,) = llm.generate(FACT, plain)
    assert len(completion.prompt_logprobs) == completion.prompt_tokens - 1
    assert [report.token for report in completion.choices[0].logprobs] == completion.choices[0].tokens
    assert all(report.rank == 1 for report in completion.choices[0].logprobs)
    forced = llm.generate(FACT, biased)[0].choices[0].logprobs[0]
    assert forced.token == 30 and forced.rank > 1
    assert forced.top[0] == pytest.approx(completion.choices[0].logprobs[0].top[0], abs=1e-2)


def test_closing_a_stream_frees_its_blocks(llm: LLM) -> None:
    pool = llm.engine.loop.scheduler.cache.pools[0]
    stream = llm.stream(FACT, SamplingParams(max_tokens=300))
    next(stream)
    assert pool.available < pool.size
    stream.close()
    assert pool.available == pool.size


@pytest.mark.parametrize(
    ("prompt", "params", "sentence"),
    [
        ("", {}, "prompt: it is empty"),
        ("x" * 4000, {}, "prompt: .* tokens leave no room"),
        (FACT, {"max_tokens": 510}, "max_tokens: 5 prompt tokens and 510 to generate exceed the context of 512"),
        ([49152], {}, "prompt: holds a token id that is not from 0 to 49151"),
        (FACT, {"stop_token_ids": (99999,)}, "stop_token_ids: token id 99999"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(llm: LLM, prompt: str, params: dict, sentence: str) -> None:
    with pytest.raises((Rejected, BadInput), match=sentence):
        llm.generate([prompt], SamplingParams(**params))


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(BadInput, match="max_row"):
        LLM(max_row=3)


def test_the_recorded_run_replays_to_the_same_plans(llm: LLM, recording: Path) -> None:
    """Runs last in this file: everything above was recorded."""
    outcome = replay(recording)
    assert outcome.difference is None
    assert outcome.steps > 50


def test_a_restart_with_the_cache_on_disk_changes_no_bit(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=5)
    runs = []
    for _ in range(2):
        with LLM(max_model_len=512, max_rows=2, kv_cache_gib=0.1, kv_disk=tmp_path, kv_disk_gib=0.5) as llm:
            (completion,) = llm.generate(LONG * 3, params)
            runs.append((completion.choices[0].tokens, completion.choices[0].logprobs, completion.cached_tokens))
    (tokens, logprobs, cold), (again, same, warm) = runs
    assert (again, same) == (tokens, logprobs)
    assert cold == 0 and warm >= completion.prompt_tokens - 32
    with LLM(max_model_len=512, max_rows=2, kv_cache_gib=0.1, kv="int8", kv_disk=tmp_path) as llm:
        assert llm.generate(LONG * 3, params)[0].cached_tokens == 0  # kept apart


def test_room_on_disk_needs_a_folder() -> None:
    with pytest.raises(BadInput, match="--kv-disk-gib: 3 needs a folder: --kv-disk FOLDER"):
        LLM(kv_disk_gib=3)
