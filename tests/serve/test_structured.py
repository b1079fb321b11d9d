"""Answers bound to a schema, an expression, a choice or a grammar: a real server, a model of random weights."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import Any

import openai
import pytest

from tests.serve.conftest import Server

USER: Any = [{"role": "user", "content": "Anything."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def sdk(tiny: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0)


def test_a_json_schema_is_followed(sdk: openai.OpenAI) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    answer = sdk.chat.completions.create(
        model="tiny", messages=USER, response_format=wanted, n=4, seed=1, max_tokens=120, logprobs=True
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        person = json.loads(choice.message.content or "")
        assert person.keys() == {"name", "age"} and 0 <= person["age"] <= 99 and len(person["name"]) <= 12


def test_streams_are_bound_too(sdk: openai.OpenAI) -> None:
    stream = sdk.chat.completions.create(
        model="tiny", messages=USER, response_format={"type": "json_object"}, seed=3, max_tokens=200, stream=True
    )
    chunks = [chunk.choices[0] for chunk in stream]
    text = "".join(choice.delta.content or "" for choice in chunks)
    if chunks[-1].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)
    else:  # cut: it says so, and is the beginning of an object
        assert chunks[-1].finish_reason == "length" and text.startswith("{")


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}}, "[0-9]{3}-[0-9]{4}"),
        ({"structured_outputs": {"choice": ["red", "green", "blue"]}}, "red|green|blue"),
        ({"structured_outputs": {"json": {"enum": ["a", 5]}}}, r'"a"|5'),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9] "y"'}}, "x[0-9]y"),
        ({"guided_regex": "(ab){3}"}, "(ab){3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_json": json.dumps({"const": "only this"})}, '"only this"'),
        ({"guided_grammar": 'start: "a" b\nb: /[0-9]{2}/'}, "a[0-9]{2}"),
    ],
    ids=str,
)
def test_vllms_names_are_known_on_both_routes(tiny: Server, fields: dict[str, Any], pattern: str) -> None:
    body = {"model": "tiny", "max_tokens": 60, "seed": 5, **fields}
    chat = tiny.post("/v1/chat/completions", {**body, "messages": USER}).json()
    assert re.fullmatch(pattern, chat["choices"][0]["message"]["content"]), chat
    text = tiny.post("/v1/completions", {**body, "prompt": "a", "min_tokens": 50}).json()
    assert re.fullmatch(pattern, text["choices"][0]["text"]), text


@pytest.mark.parametrize(
    ("fields", "field", "sentence"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "'xml' is not one of text, json_object, json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "the schema in its field schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            "response_format", 'Unimplemented keys: ["not"]',
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "give one of"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "'structural_tag' is not one of"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs", "5 is not a text"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_choice": []}, "guided_choice", "give a list of 1 to"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "not together with guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "not together with a grammar"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_followed_is_refused(tiny: Server, fields: dict[str, Any], field: str, sentence: str) -> None:
    answer = tiny.post("/v1/chat/completions", {"model": "tiny", "messages": USER, **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == field and sentence in error["message"]


def test_a_large_schema_holds_up_nobody(tiny: Server) -> None:
    """Other requests are answered while it is tried and compiled."""
    field = {"type": "string", "description": "x" * 100}
    parts = {f"part{part}": {"type": "object", "properties": {f"f{n}": field for n in range(10)}} for part in range(60)}
    schema = {"type": "object", "properties": {"n": {"const": 1}, **parts}, "required": ["n"]}
    done: list[float] = []

    def ask() -> None:
        wanted = {"type": "json_schema", "json_schema": {"name": "large", "schema": schema}}
        body = {"model": "tiny", "messages": USER, "max_tokens": 8, "response_format": wanted}
        assert tiny.post("/v1/chat/completions", body).status_code == 200
        done.append(time.monotonic())

    thread = threading.Thread(target=ask)
    thread.start()
    answered = []
    while thread.is_alive():
        assert tiny.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 2}).status_code == 200
        answered.append(time.monotonic())
    assert sum(moment < done[0] for moment in answered) >= 2


def _person(text: str) -> None:
    person = json.loads(text)
    assert person.keys() == {"name", "age"} and 0 <= person["age"] <= 99


def test_every_api_binds_its_answers(tiny: Server, sdk: openai.OpenAI) -> None:
    flat: Any = {"type": "json_schema", "name": "person", "schema": SCHEMA}
    answer = sdk.responses.create(model="tiny", input="Anyone.", text={"format": flat}, max_output_tokens=120)
    assert answer.status == "completed"
    _person(answer.output_text)
    for given in ({"output_config": {"format": flat}}, {"output_format": flat}):
        body = {"model": "tiny", "messages": USER, "max_tokens": 120, **given}
        message = tiny.post("/v1/messages", body).json()
        assert message["stop_reason"] == "end_turn", message
        _person(message["content"][0]["text"])
    for path, ask in (("/api/chat", {"messages": USER}), ("/api/generate", {"prompt": "Anyone."})):
        body = {"model": "tiny", "stream": False, "format": SCHEMA, "options": {"num_predict": 120}, **ask}
        line = tiny.post(path, body).json()
        assert line["done_reason"] == "stop", line
        _person(line["message"]["content"] if path == "/api/chat" else line["response"])


def test_a_choice_may_be_among_thousands(sdk: openai.OpenAI) -> None:
    choices = [f"answer (number) {number}." for number in range(3000)] + ['a "quoted"\nline']
    answer = sdk.chat.completions.create(
        model="tiny", messages=USER, extra_body={"guided_choice": choices}, max_tokens=60, n=3, seed=5
    )
    assert all(choice.message.content in choices for choice in answer.choices if choice.finish_reason == "stop")
    assert any(choice.finish_reason == "stop" for choice in answer.choices)


def test_a_grammar_that_cannot_be_followed_is_a_400(tiny: Server) -> None:
    for fields in (
        {"guided_regex": "((a{0,100}){0,100}){0,100}"},
        {"guided_grammar": "start: T\nT: /(.*a.{14})/ & ~/(.*b.{14})/"},
        {"guided_regex": "a" * (1 << 19)},
    ):
        answer = tiny.post("/v1/chat/completions", {"messages": USER, "max_tokens": 4, **fields})
        assert answer.status_code in (200, 400), answer.text
    for fields in ({"guided_regex": "(a{1000}){1000}"}, {"guided_regex": "[0-9]", "allowed_token_ids": [0]}):
        answer = tiny.post("/v1/chat/completions", {"messages": USER, "max_tokens": 4, **fields})
        assert answer.status_code == 400, answer.text
    assert tiny.post("/v1/chat/completions", {"messages": USER, "max_tokens": 4}).status_code == 200
