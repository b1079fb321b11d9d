"""The built-in model with drafts: the same tokens as without, fewer steps, and a recording that replays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway import LLM, SamplingParams
from headway.core.folds import Totals
from headway.core.grammar import Grammar
from headway.core.request import Finish
from headway.simulate.replay import replay

SMALL: dict[str, Any] = {"max_model_len": 1024, "max_rows": 8, "kv_cache_gib": 0.25}
ROWS = "\n".join(f"| {n} | item {n} | {n * 3}.50 | in stock |" for n in range(1, 9))
HEAD = "| no | name | price | state |"
COPY = f"{HEAD}\n|---|---|---|---|\n{ROWS}\n\nThe same table again:\n\n{HEAD}"
LINES = (Path(__file__).parents[2] / "benchmarks" / "data" / "text.txt").read_text().splitlines()
TEXTS = [line[:200] for line in LINES if len(line) > 40]


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(**SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("events") / "run.jsonl"


@pytest.fixture(scope="module")
def drafting(recording: Path) -> Iterator[LLM]:
    with LLM(draft="ngram", event_log=str(recording), **SMALL) as llm:
        yield llm


def told(llm: LLM, prompts: list[str], params: SamplingParams) -> list[tuple[list[int], str, Finish | None]]:
    done = llm.generate(prompts, params)
    return [(choice.tokens, choice.text, choice.finish) for one in done for choice in one.choices]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0}, {"temperature": 0.8, "seed": 3, "n": 2}, {"temperature": 0, "stop": ("| 4 |", "in Paris")},
        {"temperature": 0, "grammar": Grammar.regex(r"(\|[^|\n]{1,12}){4}\|\n(\| [0-9] \| item [0-9] \|\n){2,3}")},
    ],
    ids=lambda fields: " ".join(fields),
)  # fmt: skip
def test_answers_are_the_same(plain: LLM, drafting: LLM, fields: dict[str, Any]) -> None:
    params = SamplingParams(**{"max_tokens": 48, **fields})
    prompts = [COPY, "The capital of France is", "def add(a, b):\n    return a + b\n\ndef sub(a, b):"]
    assert told(drafting, prompts, params) == told(plain, prompts, params)


def test_a_stop_string_among_accepted_drafts_ends_the_answer_there(plain: LLM, drafting: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, stop=("| 2 |",), logprobs=0)
    (one,), (other,) = (llm.generate(COPY, params) for llm in (plain, drafting))
    assert one.choices[0].finish == other.choices[0].finish == Finish("stop", "| 2 |")
    assert one.choices[0].tokens == other.choices[0].tokens
    assert len(other.choices[0].logprobs) == len(other.choices[0].tokens)


def test_a_copy_takes_few_steps_and_the_recording_replays(drafting: LLM, recording: Path) -> None:
    totals = Totals()
    log = drafting.engine.loop.scheduler._log
    assert log is not None
    log.subscribe(totals)
    drafting.generate(COPY, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    assert totals.accepted_tokens > 0 and totals.steps < 50
    outcome = replay(recording)
    assert outcome.difference is None and outcome.steps > 50


@pytest.mark.slow
def test_200_prompts_have_the_same_greedy_answers(plain: LLM, drafting: LLM) -> None:
    prompts = [TEXTS[number % len(TEXTS)][number // len(TEXTS) :] for number in range(200)]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    for first in range(0, 200, 8):
        assert told(drafting, prompts[first : first + 8], params) == told(plain, prompts[first : first + 8], params)
