"""One declaration per option: the command line, `LLM(...)` and the docs follow from it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from headway import LLM
from headway.cli import chat, generate, serve
from headway.core.errors import BadInput
from headway.engine.options import EngineOptions, declared, table

DOCS = Path(__file__).parents[2] / "docs" / "engine.md"


def test_the_docs_hold_the_table_of_options() -> None:
    assert table() in DOCS.read_text(), "put there what `python -m headway.engine.options` prints"


@pytest.mark.parametrize("verb", [serve.serve, chat.chat, generate.generate])
def test_every_option_is_one_of_each_verb_and_of_llm(verb: Any) -> None:
    for taken in (inspect.signature(verb).parameters, inspect.signature(LLM).parameters):
        assert {name: taken[name].default for name in declared()} == {
            name: option.default for name, option in declared().items()
        }


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("threads", "2", "--threads: '2' is not an integer >= 1"),
        ("threads", True, "--threads: True is not an integer >= 1"),
        ("max_rows", None, "--max-rows: None is not an integer >= 1"),
        ("max_rows", 0, "--max-rows: 0 is not an integer >= 1"),
        ("kv_cache_gib", float("nan"), "--kv-cache-gib: nan is not a number above 0"),
        ("kv_cache_gib", 0, "--kv-cache-gib: 0 is not a number above 0"),
        ("policy", "fifo", "--policy: 'fifo' is not one of chunked, prefill-first, static"),
        ("deterministic", 1, "--deterministic: 1 is not true or false"),
        ("event_log", 7, "--event-log: 7 is not a text"),
        ("max_row", 7, "max_row: is not an option of the engine; there are model, backend"),
    ],
)
def test_what_an_option_does_not_accept_is_one_sentence(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(BadInput) as error:
        EngineOptions.of({name: value})
    assert str(error.value).startswith(sentence)
