"""One declaration per option: the command line, `LLM(...)` and the docs follow from it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from headway import LLM
from headway.cli import chat, generate, serve
from headway.core.errors import BadInput
from headway.core.options import Options, declared, table
from headway.engine.options import EngineOptions
from headway.serve.options import ServeOptions
from headway.serve.route.options import RouteOptions

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("kind", "python"), [(EngineOptions, "LLM(...)"), (ServeOptions, ""), (RouteOptions, "")])
def test_the_docs_hold_the_table_of_options(kind: type[Options], python: str) -> None:
    docs = DOCS / f"{kind.__module__.split('.')[-2]}.md"
    assert table(kind, python) in docs.read_text(), f"put there what `python -m {kind.__module__}` prints"


@pytest.mark.parametrize("verb", [serve.serve, chat.chat, generate.generate])
def test_every_option_is_one_of_each_verb_and_of_llm(verb: Any) -> None:
    for taken in (inspect.signature(verb).parameters, inspect.signature(LLM).parameters):
        for name, option in declared(EngineOptions).items():
            default = taken[name].default
            assert (default or () if option.kind is tuple else default) == option.default


def test_every_option_of_a_server_is_one_of_its_verb() -> None:
    taken = inspect.signature(serve.serve).parameters
    for name, option in declared(ServeOptions).items():
        assert (taken[name].default or ()) == (option.default or ())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"port": 65536}, "--port: 65536 is not an integer from 0 to 65535"),
        ({"port": -1}, "--port: -1 is not an integer from 0 to 65535"),
        ({"max_body_mib": 0}, "--max-body-mib: 0 is not a number above 0 and up to 1024"),
        ({"max_body_mib": float("nan")}, "--max-body-mib: nan is not"),
        ({"shutdown_timeout": float("inf")}, "--shutdown-timeout: inf is not a number from 0 to 1e+09"),
        ({"stall_timeout": 0}, "--stall-timeout: 0 is not a number above 0"),
        ({"access_log": "xml"}, "--access-log: 'xml' is not one of off, text, json"),
        ({"log_level": "loud"}, "--log-level: 'loud' is not one of debug, info, warning, error"),
        ({"cors_origin": "http://a"}, "--cors-origin: 'http://a' is not texts"),
        ({"cors_origin": (7,)}, "--cors-origin: (7,) is not texts"),
    ],
)
def test_what_a_server_does_not_accept_is_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput) as error:
        ServeOptions.of(options)
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("threads", "2", "--threads: '2' is not an integer >= 1"),
        ("threads", True, "--threads: True is not an integer >= 1"),
        ("max_rows", None, "--max-rows: None is not an integer from 1 to 1e+07"),
        ("max_rows", 0, "--max-rows: 0 is not an integer from 1 to"),
        *[
            (name, 10**12, f"--{name.replace('_', '-')}: 1000000000000 is not an integer from 1 to")
            for name in ("max_rows", "max_step_tokens", "block_size")
        ],
        *[
            (name, 1e308, f"--{name.replace('_', '-')}: 1e+308 is not a number above 0 and up to 1e+09")
            for name in ("max_wait", "prefix_ttl", "ttft_target", "hang_seconds")
        ],
        ("kv_cache_gib", float("nan"), "--kv-cache-gib: nan is not a number above 0"),
        ("kv_cache_gib", 0, "--kv-cache-gib: 0 is not a number above 0"),
        ("policy", "fifo", "--policy: 'fifo' is not one of chunked, prefill-first, static"),
        ("deterministic", 1, "--deterministic: 1 is not true or false"),
        ("event_log", 7, "--event-log: 7 is not a text"),
        ("max_row", 7, "max_row: is not an option of the engine; did you mean max_rows?"),
    ],
)
def test_what_an_option_does_not_accept_is_one_sentence(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(BadInput) as error:
        EngineOptions.of({name: value})
    assert str(error.value).startswith(sentence)
