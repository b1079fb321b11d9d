"""What a grammar makes a model write, its format's reader reads; and templates tell which format is theirs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from headway.core.errors import BadInput
from headway.text.grammar_worker import ByteVocabulary
from headway.text.parts import CallArguments, CallBegun, Part, Said
from headway.text.tool_formats import (
    FORMATS,
    ToolFormat,
    calls_grammar,
    calls_or_schema,
    forced_reader,
    format_of,
    free_grammar,
    named,
)

CONTROL = {
    name: 10 + number
    for number, name in enumerate(
        (
            "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|start|>", "<|end|>", "[TOOL_CALLS]", "[ARGS]",
            "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>", "<|python_tag|>",
        )
    )
}  # fmt: skip
VOCABULARY = ByteVocabulary(CONTROL)
TOKENIZER = LLTokenizer(VOCABULARY, slices=[])  # type: ignore[arg-type]
MARKS = re.compile("|".join(map(re.escape, CONTROL)))


@dataclass(frozen=True)
class Tool:
    name: str
    parameters: dict[str, Any] = field(default_factory=dict)


TOOLS = [
    Tool("weather", {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"],
                     "additionalProperties": False}),
    Tool("now", {"type": "object", "properties": {}, "additionalProperties": False}),
]  # fmt: skip
WEATHER, NOW = '{"city": "Zürich", "days": 3}', "{}"
# How a format says something, and says something before it calls, where that is not plain text.
SAYING = {
    "harmony": (
        "<|channel|>final<|message|>Hello.", "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant",
    ),
    "llama": ("Hello.\n", ""),
}  # fmt: skip
FORMAT = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


def tokens(text: str) -> list[int]:
    ids, at = [], 0
    for mark in MARKS.finditer(text):
        ids += [*VOCABULARY(text[at : mark.start()]), CONTROL[mark[0]]]
        at = mark.end()
    return [*ids, *VOCABULARY(text[at:])]


def follows(grammar: str, text: str) -> bool:
    """Whether a grammar allows a text, to its end."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(tokens(text)) and matcher.is_accepting()


def written(format: ToolFormat, *calls: tuple[str, str]) -> str:
    shape = format.shape
    each = [shape.begin + name + shape.middle + arguments + shape.end for name, arguments in calls]
    return shape.opening + shape.between.join(each) + shape.closing


def read(format: ToolFormat, text: str) -> list[Part]:
    reader = forced_reader(format, TOOLS)
    return [*reader.push(text), *reader.flush()]


@FORMAT
def test_what_is_forced_is_read(format: ToolFormat) -> None:
    one, two = ("weather", WEATHER), ("now", NOW)
    single = calls_grammar(format, TOOLS, CONTROL, parallel=False).source
    several = calls_grammar(format, TOOLS, CONTROL, parallel=True).source
    assert follows(single, written(format, one)) and follows(several, written(format, one, two))
    assert not follows(single, written(format, one, two))
    parts = [CallBegun("weather"), CallArguments(WEATHER), CallBegun("now"), CallArguments(NOW)]
    assert [part for part in read(format, written(format, one, two)) if not isinstance(part, Said)] == parts


@FORMAT
def test_schemas_and_names_are_followed(format: ToolFormat) -> None:
    grammar = calls_grammar(format, TOOLS, CONTROL, parallel=True).source
    for name, arguments in (
        ("weather", '{"days": 3}'), ("weather", '{"city": 5}'), ("other", "{}"), ("now", '{"a": 1}'),
    ):  # fmt: skip
        assert not follows(grammar, written(format, (name, arguments)))
    assert not follows(grammar, "The weather is fine.")


@FORMAT
def test_a_free_text_may_call_in_no_other_way(format: ToolFormat) -> None:
    grammar = free_grammar(format, TOOLS, CONTROL)
    if grammar is None:
        assert format.name in ("pythonic", "gemma")
        return
    call, before = written(format, ("weather", WEATHER)), SAYING.get(format.name, ("", "Let me see. "))[1]
    assert follows(grammar.source, SAYING.get(format.name, ("Hello.\n", ""))[0]) and follows(grammar.source, call)
    assert follows(grammar.source, before + call)
    assert not follows(grammar.source, before + written(format, ("weather", NOW)))


@pytest.mark.parametrize(
    ("template", "name"),
    [("qwen25", "hermes"), ("llama31", "llama"), ("mistral", "hermes"), ("gemma", "hermes"), ("smollm2", "hermes")],
)
def test_templates_tell_their_format(template: str, name: str) -> None:
    folder = Path(__file__).parents[1] / "data" / "templates"
    assert format_of((folder / f"{template}.jinja").read_text()).name == name


def test_a_format_has_a_name() -> None:
    assert named("llama").name == "llama"
    with pytest.raises(BadInput, match=r"--tool-parser: 'x' is not one of harmony"):
        named("x")


@FORMAT
def test_one_call_at_most_where_they_may_not_be_parallel(format: ToolFormat) -> None:
    grammar = free_grammar(format, TOOLS, CONTROL, parallel=False)
    if grammar is None:
        return
    call, two = written(format, ("weather", WEATHER)), written(format, ("weather", WEATHER), ("weather", WEATHER))
    said, before = SAYING.get(format.name, ("Hello.\n", "Let me see. "))
    assert follows(grammar.source, said) and follows(grammar.source, before + call)
    assert not follows(grammar.source, two)


@FORMAT
def test_calls_or_an_answer_by_a_schema(format: ToolFormat) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    grammar = calls_or_schema(format, TOOLS, CONTROL, schema, parallel=True).source
    before = "<|channel|>final<|message|>" if format.name == "harmony" else ""
    answer = before + '{"sum": 3}'
    assert follows(grammar, answer) and follows(grammar, written(format, ("weather", WEATHER), ("now", NOW)))
    assert not follows(grammar, before + '{"sum": "3"}') and not follows(grammar, before + "Three.")
    assert not follows(grammar, written(format, ("weather", NOW)))
    assert [part for part in read(format, answer) if isinstance(part, CallBegun)] == []
    said = "".join(part.text for part in read(format, answer) if isinstance(part, Said))
    assert said.strip() == '{"sum": 3}'


def test_a_text_that_begins_like_a_call_is_one() -> None:
    grammar = free_grammar(named("llama"), TOOLS, CONTROL)
    assert grammar is not None
    for text in ('{"name": "other", "parameters": {}}', ' {"a": 1}', '{"name": "weather", "parameters": {}}'):
        assert not follows(grammar.source, text)
    marked = '<|python_tag|>{"name": "now", "parameters": {}}'
    for text in ("", "No { here.", marked, written(named("llama"), ("now", NOW))):
        assert follows(grammar.source, text)
