"""The built-in model that drafts for itself: what it costs in memory, the same tokens as without, a recording that
replays; and what cannot draft is refused in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway import LLM, SamplingParams
from headway.core.errors import BadInput
from headway.core.folds import Totals
from headway.engine.draft_model import DraftModel
from headway.ops import native
from headway.roofline.fixed import FixedCosts
from headway.scheduling import drafting as drafting_module
from headway.simulate.replay import replay
from headway.text.tokenizer import Tokenizer
from tests.engine.test_demo_speculation import COPY, SMALL, told

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason="no kernels")
PROMPTS = [COPY, "The capital of France is", "def add(a, b):\n    return a + b\n\ndef sub(a, b):"]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("events") / "run.jsonl"


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM(**SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def drafting(recording: Path) -> Iterator[LLM]:
    """Its passes are said to cost nothing, and any gain is enough, or it would not draft."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftModel, "measure", lambda *_: FixedCosts(step=1e-9, bends=((2, 1e-9),)))
        patch.setattr(drafting_module, "LEAST_GAIN", 0.0)
        with LLM(draft="demo", event_log=str(recording), **SMALL) as llm:
            yield llm


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 0}, {"temperature": 0.8, "seed": 3, "n": 2}, {"temperature": 0, "presence_penalty": 0.5}],
    ids=lambda fields: " ".join(fields),
)
def test_answers_are_the_same_and_drafts_right(plain: LLM, drafting: LLM, fields: dict[str, Any]) -> None:
    totals = Totals()
    log = drafting.engine.loop.scheduler._log
    assert log is not None
    log.subscribe(totals)
    params = SamplingParams(**{"max_tokens": 32, "ignore_eos": True, **fields})
    assert told(drafting, PROMPTS, params) == told(plain, PROMPTS, params)
    if "presence_penalty" not in fields:
        assert totals.accepted_tokens == totals.drafted_tokens > 0


def test_the_recording_replays(drafting: LLM, recording: Path) -> None:
    drafting.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    outcome = replay(recording)
    assert outcome.difference is None and outcome.steps > 10


def test_the_memory_plan_counts_it(plain: LLM, drafting: LLM) -> None:
    without, with_draft = plain.engine.memory, drafting.engine.memory
    assert with_draft.draft == with_draft.weights == without.weights and without.draft == 0
    assert with_draft.blocks[0] == pytest.approx(without.blocks[0] / 2, rel=0.1), "half of each block is the draft's"
    assert with_draft.draft_cache == pytest.approx(with_draft.cache / 2, rel=0.1)
    assert with_draft.activations > without.activations
    assert "draft model" in dict(with_draft.lines()) and "draft model" not in dict(without.lines())


def test_one_that_takes_as_long_as_the_model_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting_module, "LEAST_GAIN", 1.0)
    totals = Totals()
    with LLM(draft="demo", **SMALL) as llm:
        llm.engine.loop.scheduler.drafting._drafter = FixedCosts(step=10.0)
        assert llm.engine.loop.scheduler._log is not None
        llm.engine.loop.scheduler._log.subscribe(totals)
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    assert totals.drafted_tokens == 0


def test_what_cannot_draft_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match=r"--draft: 'ngrams': .* accepted: off, ngram, or a smaller model"):
        LLM(draft="ngrams", **SMALL)
    monkeypatch.setattr(Tokenizer, "parting", lambda *_: "token 7 is 'a' there and 'b' here")
    with pytest.raises(BadInput, match=r"--draft: 'demo': .* has another tokenizer: token 7 is 'a' there and 'b' here"):
        LLM(draft="demo", **SMALL)
