"""Grammars are tried in a process of their own: what cannot be followed is one sentence, and never the end of ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from headway.core.errors import BadInput
from headway.core.grammar import Grammar
from headway.text.grammar import GrammarChecker


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker({"<|im_end|>": 7})
    yield checker
    checker.close()


def chain(length: int) -> dict[str, Any]:
    """A schema whose references lead from one to the next."""
    links: dict[str, Any] = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {}}}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.json_object(),
        Grammar.json_schema(True),
        Grammar.json_schema({"type": "object", "properties": {"a": {"type": "integer"}}}),
        Grammar.json_schema({"type": "array", "items": {"const": {"uniqueItems": False}}, "uniqueItems": False}),
        Grammar.json_schema({"type": "string", "format": "uri-reference"}),  # an annotation
        Grammar.json_schema({"properties": {"format": {"format": "int64"}, "other": {"const": {"format": "odd"}}}}),
        Grammar.regex("[a-z]+|"),
        Grammar.choice(["a", 'é "quoted"\n', "a longer one"]),
        Grammar.ebnf('start: "a" b\nb: /[0-9]+/'),
        Grammar.ebnf('root ::= "a" | [0-9]+'),
        Grammar.ebnf('start: "a" <|im_end|>'),
        Grammar.ebnf('start: "a" <[7]>'),
    ],
    ids=lambda grammar: grammar.source[:24],
)
def test_what_can_be_followed_is_compiled(checker: GrammarChecker, grammar: Grammar) -> None:
    compiled = checker.check(grammar)
    assert compiled.kind == "compiled"
    assert checker.known(grammar) == compiled
    assert checker.check(compiled) == compiled


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        (Grammar.json_schema({"not": {}}), r'response_format: Unimplemented keys: \["not"\]'),
        (Grammar.json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum .5. is greater than maximum"),
        (Grammar.json_schema({"enum": []}), "Unsatisfiable schema"),
        (Grammar.json_schema(False), "no JSON is valid by it"),
        (Grammar.json_schema("[1]"), "a JSON schema is an object"),
        (Grammar.json_schema("{"), "response_format: Expecting property name"),
        (Grammar.json_schema({"$ref": "#/nowhere"}), "'#/nowhere' does not exist"),
        (Grammar.json_schema({"$ref": "http://localhost/a"}), "Default retriever does not fetch"),
        (Grammar.regex("(a"), "error: unclosed group"),
        (Grammar.regex("a(?=b)"), "error: look-around"),
        (Grammar.regex("(a{1000}){1000}"), "too many expressions constructed"),  # told behind its first letter
        (Grammar.regex("(a{1000}b){1000}"), "too many expressions constructed"),
        (Grammar.ebnf("start: start"), "there is no text that it allows"),
        (Grammar.ebnf("nonsense"), "Expected ::="),
        (Grammar.ebnf('start: "a" <|unheard_of|>'), "unknown special token"),
    ],
    ids=lambda value: value.source[:24] if isinstance(value, Grammar) else "",
)
def test_what_cannot_is_one_sentence(checker: GrammarChecker, grammar: Grammar, sentence: str) -> None:
    for _ in range(2):  # asked, and remembered
        with pytest.raises(BadInput, match=sentence) as error:
            checker.check(grammar, "response_format")
        assert "\n" not in str(error.value)


def test_a_grammar_that_ends_the_compiler_ends_nothing_else(checker: GrammarChecker) -> None:
    """llguidance overflows its stack on it."""
    with pytest.raises(BadInput, match="too complex to be compiled: its process ended"):
        checker.check(Grammar.json_schema(chain(50_000)))
    assert checker.check(Grammar.regex("b+")).kind == "compiled"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Grammar("xml", "x"), "grammar: 'xml' is not one of json_schema"),
        (lambda: Grammar.regex(""), "its source must be a text of 1 to"),
        (lambda: Grammar.choice([]), "choice: give a list"),
        (lambda: Grammar.choice(["a", ""]), "choice: give a list"),
        (lambda: Grammar.choice("abc"), "choice: give a list"),
    ],
)
def test_what_is_no_grammar_is_refused(make: Any, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        make()
