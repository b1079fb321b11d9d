"""Neutral conversations and answers: how turns and tools reach a chat template, and how parts become blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

from headway.core.request import Finish, SamplingParams
from headway.engine.messages import Delta
from headway.serve.answer import Answer, Query
from headway.serve.choice import Choice, Prompt
from headway.serve.conversation import Message, Tool, ToolCall, template_messages, template_tools
from headway.serve.dialects.ollama.format import LineFormat
from headway.serve.dialects.openai.format import ChatFormat
from headway.serve.dialects.openai.messages import Message as OpenAIMessage
from headway.serve.dialects.openai.messages import conversation
from headway.text.parts import CallArguments, CallBegun, Part, Said, Thought
from tests.serve.scripted import ByteTokenizer

CALL = ToolCall("c1", "weather", '{"city": "Bonn"}')


class Commas:
    """One part per text between commas: `t` thought, `c` call, `a` arguments, else said."""

    thinking = False

    def push(self, text: str) -> Sequence[Part]:
        kinds: dict[str, Callable[[str], Part]] = {"t": Thought, "c": CallBegun, "a": CallArguments}
        return [kinds.get(piece[0], Said)(piece[1:]) for piece in text.split(",") if piece]

    def flush(self) -> Sequence[Part]:
        return [Said(".")]


def answered(format: Any, *texts: str) -> tuple[Answer, Choice, list[bytes]]:
    query = Query(
        params=SamplingParams(), field="messages", model="model", id_prefix="x-", format=format, parser=Commas
    )
    answer = Answer(query, [(Prompt((1, 2)), 8)], "", 0)
    (choice,), writer, pieces = answer.choices, query.format(answer), []
    for number, text in enumerate(texts):
        finish = Finish("stop") if number == len(texts) - 1 else None
        gain = answer.gain(choice, Delta(f"{answer.id}-0", 0, 0, (1,), text, finish=finish))
        choice.add(gain)
        choice.finish = gain.finish
        pieces.append(writer.chunk(choice, gain))
    return answer, choice, [*pieces, writer.end()]


def test_templates_get_calls_and_results_as_transformers_gives_them() -> None:
    turns = [Message("assistant", "", tool_calls=(CALL,)), Message("tool", "rain", name="weather", tool_call_id="c1")]
    assert template_messages(turns, knows_developer=False) == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
            ],
        },
        {"role": "tool", "content": "rain", "name": "weather", "tool_call_id": "c1"},
    ]
    broken = template_messages([Message("assistant", "", tool_calls=(ToolCall("c", "f", "{cut"),))], False)
    assert broken[0]["tool_calls"][0]["function"]["arguments"] == "{cut"
    assert template_tools(()) is None
    assert template_tools([Tool("f", "does", {"type": "object"})]) == [
        {"type": "function", "function": {"name": "f", "description": "does", "parameters": {"type": "object"}}}
    ]


def test_openai_turns_with_calls_and_results() -> None:
    raw = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function":
            {"name": "weather", "arguments": '{"city": "Bonn"}'}, "index": 0}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]  # fmt: skip
    turns = conversation(msgspec.convert(raw, list[OpenAIMessage]))
    assert turns == [
        Message("assistant", "", tool_calls=(CALL,)),
        Message("tool", "rain", tool_call_id="c1"),
        Message("assistant", "No."),
    ]


@pytest.mark.parametrize("format", [ChatFormat, partial(LineFormat, True)])
def test_blocks_are_in_order_and_calls_end_an_answer_for_tools(format: Any) -> None:
    extra = (ByteTokenizer(), None) if isinstance(format, partial) else (ByteTokenizer(), None, False, None)
    make = partial(format, *extra)
    _, choice, _ = answered(make, "thm,tm", "xhi", "cweather,a{", "a}")
    assert [(block.kind, block.text, block.name) for block in choice.blocks] == [
        ("reasoning", "hmm", ""), ("text", "hi", ""), ("call", "{}", "weather"), ("text", ".", ""),
    ]  # fmt: skip
    assert choice.finish == Finish("tool_calls") and choice.called[0].id.startswith("call_")


def test_openai_streams_reasoning_and_calls() -> None:
    make = partial(ChatFormat, ByteTokenizer(), None, False, None)
    answer, _, pieces = answered(make, "thm", "xhi", "cone,a{,a},ctwo", "a[]")
    lines = [line for line in b"".join(pieces).decode().split("\n\n") if line and "[DONE]" not in line]
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    calls = [call for delta in deltas for call in delta["delta"].get("tool_calls", ())]
    assert deltas[1]["delta"] == {"reasoning_content": "hm", "reasoning": "hm"}
    assert [call["index"] for call in calls] == [0, 0, 0, 1, 1]
    assert deltas[-1]["finish_reason"] == "tool_calls"
    message = json.loads(b"".join(make(answer).whole()))["choices"][0]["message"]
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "one", "arguments": "{}"}, {"name": "two", "arguments": "[]"},
    ]  # fmt: skip
    assert message["reasoning_content"] == message["reasoning"] == "hm" and message["content"] == "hi."


def test_ollama_streams_calls_whole() -> None:
    _, _, pieces = answered(partial(LineFormat, True, ByteTokenizer(), None), "thm", 'cone,a{"a": ,a1}', "ctwo")
    lines = [json.loads(line) for line in b"".join(pieces).splitlines()]
    calls = [call["function"] for line in lines for call in line["message"].get("tool_calls", ())]
    assert calls == [{"name": "one", "arguments": {"a": 1}}, {"name": "two", "arguments": {}}]
    assert lines[0]["message"] == {"role": "assistant", "content": "", "thinking": "hm"}
    assert lines[-1]["done_reason"] == "stop"
