"""Faults that users reported of other engines' model and tokenizer files, each test named by the report's id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway import LLM, SamplingParams
from headway.core.errors import ModelFileError
from tests.model.test_checkpoint import change
from tests.serve.conftest import write_tiny_checkpoint

SMALL: dict[str, Any] = {"backend": "reference", "kv_cache_gib": 0.01}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_checkpoint(tmp_path)
    return tmp_path


def forced(token: int, **fields: Any) -> SamplingParams:
    """Nothing but `token` is generated."""
    return SamplingParams(temperature=0, max_tokens=4, logit_bias=((token, 100.0),), **fields)


def test_t2_010_every_end_token_that_any_file_names_ends_the_answer(folder: Path) -> None:
    change(folder / "config.json", eos_token_id=20)
    change(folder / "generation_config.json", eos_token_id=[20, 21])
    change(folder / "tokenizer_config.json", eos_token={"content": "<|im_end|>"})
    named = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]["<|im_end|>"]
    with LLM(folder, **SMALL) as llm:
        assert llm.engine.tokenizer.eos_ids == (20, 21, named)
        for token in (20, 21, named):
            (choice,) = llm.generate("the", forced(token))[0].choices
            assert (choice.finish.reason, choice.tokens, choice.text) == ("stop", [token], "")
            (choice,) = llm.generate("the", forced(token, ignore_eos=True))[0].choices
            assert (choice.finish.reason, len(choice.tokens)) == ("length", 4)
            (choice,) = llm.generate("the", forced(token, ignore_eos=True, stop_token_ids=(21,)))[0].choices
            assert choice.finish.reason == ("stop" if token == 21 else "length")


@pytest.mark.parametrize(("value", "ids"), [(21, (21, 20)), ([], (20,)), (None, (20,)), (..., (20,)), (20, (20,))])
def test_t2_010_ways_to_write_end_tokens(folder: Path, value: Any, ids: tuple[int, ...]) -> None:
    change(folder / "config.json", eos_token_id=20)
    change(folder / "generation_config.json", eos_token_id=value)
    change(folder / "tokenizer_config.json", eos_token=...)
    with LLM(folder, **SMALL) as llm:
        assert llm.engine.tokenizer.eos_ids == ids


@pytest.mark.parametrize("value", ["</s>", 10**6, [3, 10**6], -1, 2.0, True])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_t2_010_an_end_token_that_is_none_is_refused_by_name(folder: Path, file: str, value: Any) -> None:
    change(folder / file, eos_token_id=value)
    with pytest.raises(ModelFileError, match=f"{file}: eos_token_id: "):
        LLM(folder, **SMALL)
