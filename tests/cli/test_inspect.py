"""`headway inspect`: what it shows is what the engine computes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headway import LLM, SamplingParams
from headway.cli import main
from headway.core.errors import BadInput
from headway.engine.inspection import MOST_TOKENS, Inspection, inspect
from headway.model.load import open_model
from headway.sampling.trace import row_before, trace
from headway.text.tokenizer import Tokenizer
from tests.serve.conftest import write_tiny_checkpoint

PROMPT = "The quick brown fox jumps over the lazy dog, again and again."
SAMPLED = SamplingParams(max_tokens=6, temperature=0.9, top_k=20, top_p=0.9, seed=5, repetition_penalty=1.2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspected")
    write_tiny_checkpoint(folder)
    return folder


def seen(model: Path, prompt: str = PROMPT, params: SamplingParams = SAMPLED, **given: int) -> Inspection:
    opened = open_model(model)
    return inspect(opened, Tokenizer(opened.info.tokenizer).encode(prompt), params, (), **given)


def test_it_draws_what_the_engine_draws(model: Path) -> None:
    found = seen(model)
    with LLM(model, backend="reference", kv_cache_gib=0.01) as llm:
        answer = llm.generate(PROMPT, SAMPLED, show_progress=False)[0]
    assert tuple(found.tokens[found.prompt_len :]) == tuple(answer.choices[0].tokens)
    assert [one.cached for one in found.growth] == list(range(found.prompt_len, len(found.tokens)))
    assert [one.computed for one in found.growth] == [found.prompt_len, 1, 1, 1, 1, 1]


def test_attention_is_the_softmax_of_the_models_own_scores(model: Path) -> None:
    whole = seen(model, position=3)
    assert set(whole.attention) == {0, 1} and whole.attention[0].shape == (4, 4)
    for weights in whole.attention.values():
        assert np.allclose(weights.sum(axis=1), 1, atol=1e-6) and (weights >= 0).all()
    assert np.allclose(seen(model).attention[1].sum(axis=1), 1, atol=1e-6)  # the prompt's last token
    later = seen(model, position=len(whole.tokens) - 2)  # of the answer
    assert later.attention[0].shape == (4, len(whole.tokens) - 1)


def test_stages_are_those_of_the_sampler(model: Path) -> None:
    found = seen(model, top=5)
    stages = found.stages[found.prompt_len - 1]
    assert [stage.name for stage in stages] == ["model", "penalties", "temperature", "top_k", "top_p", "min_p"]
    assert [stage.active for stage in stages] == [True, True, True, True, True, False]
    assert stages[3].survivors == 20 and stages[4].survivors <= 20
    assert all(len(stage.top) == min(5, stage.survivors) for stage in stages)
    assert len(found.stages) == len(found.drawn) == len(found.embedding) == len(found.tokens) - 1
    logits = np.random.default_rng(0).normal(size=300).astype(np.float32)
    row = row_before((1, 2, 3), 3, SAMPLED)
    assert trace(logits, row, 3).stages[3].survivors == 20


def test_the_verb_prints_text_json_and_a_page(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "seen.html"
    with pytest.raises(SystemExit) as ended:
        main(["inspect", str(model), "--prompt", PROMPT, "--max-tokens", "2", "--html", str(page), "--seed", "1"])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and "head 3" in text and "What follows position" in text and "drawn" in text
    html = page.read_text()
    assert "What follows position 0" in html and "<script" not in html and 'class="heat"' in html
    with pytest.raises(SystemExit):
        main(["inspect", str(model), "--prompt", PROMPT, "--max-tokens", "2", "--json", "--seed", "1"])
    found = json.loads(capsys.readouterr().out)
    assert "".join(bytes(token["bytes"]).decode() for token in found["tokens"][: found["prompt_len"]]) == PROMPT
    assert found["attention"]["position"] == found["prompt_len"] - 1
    assert [len(head) for head in found["attention"]["layers"]["0"]] == [found["prompt_len"]] * 4


def test_what_cannot_be_shown_is_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BadInput, match="--prompt"):
        seen(model, params=SamplingParams(max_tokens=MOST_TOKENS, seed=0))
    with pytest.raises(BadInput, match="--position: 99"):
        seen(model, position=99)
    with pytest.raises(SystemExit):
        main(["inspect", str(model), "--prompt", "a", "--layer", "7"])
    assert "--layer: 7 is none of the 2" in capsys.readouterr().err
