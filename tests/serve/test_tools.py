"""Tools over OpenAI's API, with its own client: a real server, a model of random weights that a grammar makes call."""

# ruff: noqa: E501

from __future__ import annotations

import json
import sys
from typing import Any

import openai
import pytest

from tests.serve.conftest import CHATML, Server, write_tiny_checkpoint

USER: Any = [{"role": "user", "content": "What is the weather?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}},
]
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture
def sdk(tiny: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0)


def test_a_named_tool_is_called(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model="tiny", messages=USER, tools=TOOLS, tool_choice=NAMED, n=3, seed=2, max_tokens=150
    )
    ids = set()
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        (call,) = choice.message.tool_calls or []
        assert call.type == "function" and call.function.name == "weather"
        arguments = json.loads(call.function.arguments)
        assert arguments["city"] in ("Rome", "Oslo") and 1 <= arguments["days"] <= 7
        ids.add(call.id)
    assert len(ids) == 3


def test_streams_give_what_whole_answers_do(sdk: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "messages": USER, "tools": TOOLS, "tool_choice": "required", "seed": 7, "max_tokens": 150,
        "parallel_tool_calls": False,
    }  # fmt: skip
    whole = sdk.chat.completions.create(**asked).choices[0]
    with sdk.chat.completions.stream(**asked) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == whole.finish_reason == "tool_calls"
    (ours,), (theirs,) = choice.message.tool_calls or [], whole.message.tool_calls or []
    assert ours.function.name == theirs.function.name and ours.function.arguments == theirs.function.arguments


def test_results_go_back_to_the_model(sdk: openai.OpenAI) -> None:
    turns: Any = [
        *USER,
        {
            "role": "assistant", "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "It is noon."},
    ]  # fmt: skip
    with_result = sdk.chat.completions.create(model="tiny", messages=turns, tools=TOOLS, max_tokens=3)
    without = sdk.chat.completions.create(model="tiny", messages=USER, tools=TOOLS, max_tokens=3)
    none = sdk.chat.completions.create(model="tiny", messages=USER, tools=TOOLS, tool_choice="none", max_tokens=3)
    tokens = [answer.usage.prompt_tokens for answer in (with_result, without, none) if answer.usage]
    assert tokens[0] > tokens[1] > tokens[2]  # a template without tools gets them as text; not those it may not call


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"guided_regex": "[a-z]+"}, "guided_regex"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"not": {}}}}], "tool_choice": "required"},
         "tools"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_called_is_refused(tiny: Server, fields: dict[str, Any], param: str) -> None:
    answer = tiny.post("/v1/chat/completions", {"model": "tiny", "messages": USER, "tools": TOOLS, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param), answer.text


def test_an_answer_is_calls_or_follows_its_schema(sdk: openai.OpenAI) -> None:
    """Whatever a model of random weights draws: one or the other, whole."""
    schema = {"type": "object", "properties": {"sum": {"type": "integer", "maximum": 9}}, "required": ["sum"]}
    named = {"name": "sum", "schema": {**schema, "additionalProperties": False}}
    wanted: Any = {"type": "json_schema", "json_schema": named}
    answer = sdk.chat.completions.create(
        model="tiny", messages=USER, tools=TOOLS, response_format=wanted, n=12, seed=1, max_tokens=150
    )
    kinds = set()
    for choice in answer.choices:
        kinds.add(choice.finish_reason)
        if choice.finish_reason == "tool_calls":
            assert all(
                isinstance(json.loads(call.function.arguments), dict) for call in choice.message.tool_calls or ()
            )
        elif choice.finish_reason == "stop":
            assert json.loads(choice.message.content or "").keys() == {"sum"}
    assert kinds & {"stop", "tool_calls"}, kinds


def test_reasoning_is_told_apart_and_bounded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The template opens the reasoning, of which there is a budget; then comes what the schema says."""
    folder = tmp_path_factory.mktemp("thinker")
    write_tiny_checkpoint(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHATML.replace("assistant\n", "assistant\n<think>\n"), "eos_token": "<|im_end|>"})
    )
    command = [sys.executable, "-m", "headway", "serve", str(folder), "--port", "0", "--kv-cache-gib", "0.01"]
    server = Server(command=[*command, "--served-model-name", "thinker"])
    try:
        sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        asked: Any = {
            "model": "thinker", "messages": USER, "seed": 2, "max_tokens": 120,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": PARAMETERS}},
            "extra_body": {"thinking_token_budget": 12},
        }  # fmt: skip
        answer = sdk.chat.completions.create(**asked)
        message = answer.choices[0].message
        assert json.loads(message.content or "").keys() == {"city", "days"}
        thought = message.model_dump()["reasoning_content"]
        assert thought and thought == message.model_dump()["reasoning"] and "think>" not in thought
        details = answer.usage and answer.usage.completion_tokens_details
        closing = len("</think>")  # at most, in tokens
        assert details is not None and 12 < (details.reasoning_tokens or 0) <= 12 + closing
        deltas = [chunk.choices[0].delta.model_dump() for chunk in sdk.chat.completions.create(**asked, stream=True)]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == thought
        assert "".join(delta["content"] or "" for delta in deltas) == message.content
    finally:
        server.kill()


@pytest.mark.parametrize("name", ['a"b', "a\nb", "", "<|im_end|>", "a\\b", 'a", "arguments": {}}', "x" * 129])
def test_a_name_that_no_tool_can_have_is_refused(server: Server, name: str) -> None:
    tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [tool]})
    assert answer.status_code == 400 and "is not 1 to 128 letters" in answer.json()["error"]["message"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
    answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [tool]})
    assert answer.status_code == 400 and "type object" in answer.json()["error"]["message"]
