"""Faults that users reported of other servers' tools, schemas, reasoning and Anthropic routes, each test named by
repository and number of the report; the others are in `test_reported_bugs.py`, which counts these too."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serve.conftest import CHATML, Server, events, write_tiny_checkpoint
from tests.serve.test_answers import CHAT
from tests.serve.test_anthropic import sent
from tests.serve.test_tools import TOOLS, USER

TWO_CALLS = (
    'First the weather. <tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


def saying(text: str, **fields: Any) -> dict[str, Any]:
    """A body that has this text for an answer."""
    return {"messages": [{"role": "user", "content": f"say:{text}"}], "tools": TOOLS, "max_tokens": 400, **fields}


def whole(server: Server, body: dict[str, Any]) -> tuple[str, list[tuple[str, str]], str]:
    """(content, (name, arguments) of each call, why it ended) of a whole answer."""
    answer = server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    calls = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    named = [(call["name"], call["arguments"]) for call in calls]
    return choice["message"]["content"] or "", named, choice["finish_reason"]


def pieces(server: Server, body: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """(deltas, why it ended) of a streamed answer."""
    answer = server.post(CHAT, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    choices = [event["choices"][0] for event in events(answer) if event["choices"]]
    return [choice["delta"] for choice in choices], choices[-1]["finish_reason"]


def joined(server: Server, body: dict[str, Any]) -> tuple[str, list[tuple[str, str]], str]:
    """`whole` of the same answer, streamed and put together."""
    deltas, reason = pieces(server, body)
    calls: dict[int, list[str]] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls") or ()):
        known = calls.setdefault(call["index"], ["", ""])
        known[0] += call["function"].get("name") or ""
        known[1] += call["function"].get("arguments") or ""
    content = "".join(delta.get("content") or "" for delta in deltas)
    return content, [(name, arguments) for name, arguments in calls.values()], reason


@pytest.mark.parametrize("text", ["Look: <tool_x and more", "Look: <_x and more", "Look: <tool_call_x and more"])
def test_vllm_42210_a_stop_string_where_a_call_might_begin(server: Server, text: str) -> None:
    body = saying(text, stop=["_x"])
    assert joined(server, body) == whole(server, body) == (text.partition("_x")[0], [], "stop")


def test_lmdeploy_3412_two_calls_in_a_stream(server: Server) -> None:
    sdk = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    asked: Any = saying(TWO_CALLS)
    with sdk.chat.completions.stream(model="scripted", **asked) as stream:
        choice = stream.get_final_completion().choices[0]
    calls = [call.function for call in choice.message.tool_calls or ()]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("weather", {"city": "Rome", "days": 2}),
        ("now", {}),
    ]
    assert choice.finish_reason == "tool_calls" and (choice.message.content or "").strip() == "First the weather."


def test_sglang_4700_a_call_is_named_once(server: Server) -> None:
    deltas, reason = pieces(server, saying(TWO_CALLS))
    of_calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    assert reason == "tool_calls" and [call["index"] for call in of_calls] == sorted(call["index"] for call in of_calls)
    for index, name, arguments in ((0, "weather", {"city": "Rome", "days": 2}), (1, "now", {})):
        first, *rest = [call for call in of_calls if call["index"] == index]
        assert first["id"] and first["type"] == "function" and first["function"]["name"] == name
        for call in rest:
            assert call.get("id") is None and call.get("type") is None and call["function"].get("name") is None
        sent = "".join(call["function"].get("arguments") or "" for call in (first, *rest))
        assert json.loads(sent) == arguments  # and nothing of it twice


@pytest.mark.parametrize("most", [5, 22, 30, 41, 55, 70, 90, 108, 118, 125, 140, 160])
def test_vllm_47903_a_call_that_is_cut(server: Server, most: int) -> None:
    body = saying(TWO_CALLS, max_tokens=most)
    content, calls, reason = whole(server, body)
    assert joined(server, body) == (content, calls, reason)
    assert "tool_call>" not in content and "arguments" not in content
    assert reason == "length"


@pytest.mark.parametrize("content", [None, "missing", "", []], ids=str)
def test_mlx_openai_server_205_a_call_without_content(tiny: Server, content: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    turn: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [call]}
    if content == "missing":
        del turn["content"]
    result = {"role": "tool", "tool_call_id": "c1", "content": "It is noon."}
    body = {"model": "tiny", "messages": [*USER, turn, result], "tools": TOOLS, "max_tokens": 1}
    answer = tiny.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    uncalled = {**body, "messages": [*USER, {"role": "assistant", "content": "."}, result]}
    tokens = [one["usage"]["prompt_tokens"] for one in (answer.json(), tiny.post(CHAT, uncalled).json())]
    assert tokens[0] > tokens[1]  # the call is in the prompt


def test_sglang_7639_a_tool_whose_parameters_name_themselves(tiny: Server) -> None:
    group = {
        "type": "object",
        "properties": {
            "all": {"type": "boolean"},
            "of": {"type": "array", "items": {"$ref": "#/$defs/group"}, "maxItems": 2},
        },
        "required": ["all"],
        "additionalProperties": False,
    }
    parameters = {"$defs": {"group": group}, "$ref": "#/$defs/group"}
    tool = {"type": "function", "function": {"name": "filter", "parameters": parameters}}
    body = {"model": "tiny", "messages": USER, "tools": [tool], "tool_choice": "required", "max_tokens": 200, "seed": 1}
    content, calls, reason = whole(tiny, body)
    assert joined(tiny, body) == (content, calls, reason)
    for _, arguments in calls if reason == "tool_calls" else ():
        assert isinstance(json.loads(arguments)["all"], bool)
    assert calls and tiny.client().get("/health").status_code == 200


@pytest.mark.parametrize("pointer", ["#/properties/tree/anyOf/1", "#/properties/pair/prefixItems/0"])
def test_llama_cpp_16790_references_into_lists(tiny: Server, pointer: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "tree": {"anyOf": [{"type": "null"}, {"enum": ["oak", "fir"]}]},
            "pair": {"type": "array", "prefixItems": [{"enum": ["oak", "fir"]}], "minItems": 1, "maxItems": 1},
            "again": {"$ref": pointer},
        },
        "required": ["tree", "pair", "again"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "trees", "schema": schema}}
    body = {"model": "tiny", "messages": USER, "response_format": wanted, "max_tokens": 120, "seed": 4, "n": 4}
    answer = tiny.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert choice["finish_reason"] == "stop" and json.loads(choice["message"]["content"])["again"] in ("oak", "fir")


def test_llama_cpp_16790_a_reference_to_nothing_is_refused(tiny: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/properties/b/anyOf/1"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "none", "schema": schema}}
    answer = tiny.post(CHAT, {"model": "tiny", "messages": USER, "response_format": wanted, "max_tokens": 9})
    assert answer.status_code == 400 and "#/properties/b/anyOf/1" in answer.json()["error"]["message"], answer.text


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model of random weights whose template opens its reasoning, which is closed after twelve tokens."""
    folder = tmp_path_factory.mktemp("thinker")
    write_tiny_checkpoint(folder)
    template = CHATML.replace("assistant\n", "assistant\n<think>\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|im_end|>"}))
    command = [sys.executable, "-m", "headway", "serve", str(folder), "--port", "0", "--kv-cache-gib", "0.01"]
    server = Server(command=[*command, "--served-model-name", "thinker"])
    yield server
    server.stop()


THINKING = {"messages": USER, "seed": 2, "max_tokens": 60, "thinking_token_budget": 12, "temperature": 1}


def parts(deltas: list[dict[str, Any]]) -> tuple[str, str]:
    return tuple("".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content"))  # type: ignore[return-value]


def test_vllm_45636_a_stop_string_that_is_never_met(thinker: Server) -> None:
    for seed in range(4):
        plain, _ = pieces(thinker, {**THINKING, "seed": seed})
        whole_text = "".join(parts(plain))
        for stop in ("</thinkers", "\x01\x02b,c"):
            assert stop not in whole_text
            stopped, _ = pieces(thinker, {**THINKING, "seed": seed, "stop": [stop]})
            assert parts(stopped) == parts(plain) and parts(plain)[0]


def test_vllm_50624_reasoning_has_both_names(thinker: Server) -> None:
    message = thinker.post(CHAT, THINKING).json()["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] != ""
    deltas, _ = pieces(thinker, THINKING)
    assert parts(deltas)[0] == message["reasoning_content"]
    assert all(delta.get("reasoning") == delta.get("reasoning_content") for delta in deltas)
    for name in ("reasoning", "reasoning_content"):
        history = [*USER, {"role": "assistant", "content": "Fine.", name: "I looked."}, *USER]
        answer = thinker.post(CHAT, {"messages": history, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        assert "x-headway-ignored" not in answer.headers


def test_sglang_20678_a_stream_begins_with_true_usage(tiny: Server) -> None:
    body = {
        "model": "tiny", "max_tokens": 5, "stream": True,
        "messages": [{"role": "user", "content": "Which of all the winds is it that blows from the west? " * 4}],
    }  # fmt: skip
    counted = tiny.post("/v1/messages/count_tokens", {"messages": body["messages"]}).json()["input_tokens"]
    for again in (False, True):
        stream = sent(tiny.post("/v1/messages", body))
        (start,) = [event["message"]["usage"] for event in stream if event["type"] == "message_start"]
        (end,) = [event["usage"] for event in stream if event["type"] == "message_delta"]
        assert start["input_tokens"] + start["cache_read_input_tokens"] == counted > 0
        assert (start["cache_read_input_tokens"] > 0) is again
        assert 1 <= end["output_tokens"] <= 5
