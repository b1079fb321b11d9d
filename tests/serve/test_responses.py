"""The Responses API: OpenAI's own client against the scripted model, and what the wire looks like."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from headway.serve.conversation import Message
from headway.serve.dialects.responses.format import ResponseFormat
from headway.serve.store import MAX_CONVERSATIONS, Conversations
from tests.serve.conftest import Server
from tests.serve.scripted import ByteTokenizer
from tests.serve.test_conversation import answered

PATH = "/v1/responses"


@pytest.fixture
def sdk(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def sent(data: bytes) -> list[dict[str, Any]]:
    """The events of a stream; checks names and numbers."""
    found = []
    for block in data.decode().strip().split("\n\n"):
        if block.startswith(":"):  # it keeps a slow stream alive
            continue
        name, body = (line.partition(": ")[2] for line in block.split("\n"))
        found.append(json.loads(body))
        assert found[-1]["type"] == name and found[-1]["sequence_number"] == len(found) - 1
    return found


def test_the_client_talks(sdk: openai.OpenAI) -> None:
    answer = sdk.responses.create(model="scripted", input="say:Hällo 🙂", instructions="Be brief.")
    assert answer.output_text == "Hällo 🙂" and answer.status == "completed"
    assert answer.usage is not None and answer.usage.output_tokens == len("Hällo 🙂".encode()) + 1
    assert answer.instructions == "Be brief." and answer.id.startswith("resp_")
    cut = sdk.responses.create(model="scripted", input="count", max_output_tokens=3)
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens" and cut.output_text == "012"


def test_the_client_streams(sdk: openai.OpenAI) -> None:
    with sdk.responses.stream(model="scripted", input="say:Hällo 🙂") as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == "Hällo 🙂"
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}


def test_items_of_a_stream_are_those_of_the_whole_answer() -> None:
    kept: dict[str, Any] = {}
    make = partial(ResponseFormat, ByteTokenizer(), None, {}, lambda id, blocks: kept.update({id: blocks}))
    answer, _, pieces = answered(make, "thm,tm", "xhi", 'cweather,a{"city"', "a:1}")
    events = sent(b"".join(pieces))
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    whole = json.loads(b"".join(make(answer).whole()))
    assert whole["output"] == events[-1]["response"]["output"] == items
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "message"]
    assert items[2]["arguments"] == '{"city":1}' and items[2]["call_id"].startswith("call_")
    added = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    assert added == [0, 1, 2, 3]
    arguments = [event for event in events if event["type"].startswith("response.function_call_arguments")]
    assert "".join(event.get("delta", "") for event in arguments) == arguments[-1]["arguments"] == '{"city":1}'
    assert [block.kind for block in kept[answer.id]] == ["reasoning", "text", "call", "text"]


def test_log_probabilities(sdk: openai.OpenAI, server: Server) -> None:
    include = ["message.output_text.logprobs"]
    fields: Any = {"model": "scripted", "input": "say:hi 🙂", "top_logprobs": 2, "include": include}
    part: Any = sdk.responses.create(**fields).output[0].content[0]  # type: ignore[union-attr,index]
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode() == "hi 🙂"
    events = sent(server.post(PATH, {**fields, "stream": True}).content)
    deltas = [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]]
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert deltas == done["logprobs"] and len(deltas) == len(part.logprobs)


def test_a_conversation_goes_on(sdk: openai.OpenAI) -> None:
    first = sdk.responses.create(model="scripted", input="say:one", instructions="Be brief.")
    second = sdk.responses.create(model="scripted", input="say:two", previous_response_id=first.id)
    assert second.output_text == "two" and second.previous_response_id == first.id
    spelled: Any = [
        {"role": "user", "content": "say:one"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "one"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "say:two"}]},
    ]
    same = sdk.responses.create(model="scripted", input=spelled, store=False)
    assert first.usage and second.usage and same.usage
    assert same.usage.input_tokens == second.usage.input_tokens
    for id in ("resp_none", same.id):
        with pytest.raises(openai.NotFoundError, match="previous_response_id"):
            sdk.responses.create(model="scripted", input="say:a", previous_response_id=id)


def test_calls_and_their_results_are_turns(server: Server) -> None:
    items = [
        {"role": "user", "content": "Rain?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}", "id": "fc_1"},
        {"type": "function_call_output", "call_id": "c1", "output": "yes"},
        {"role": "user", "content": "say:ok"},
    ]
    answer = server.post(PATH, {"model": "scripted", "input": items})
    assert answer.status_code == 200, answer.text
    assert answer.json()["output"][0]["content"][0]["text"] == "ok"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": -1}, "temperature"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
    ],
    ids=str,
)
def test_what_is_at_fault_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    refused = server.post(PATH, {"model": "scripted", "input": "say:a", **fields})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param


def test_a_failure_ends_a_stream(server: Server) -> None:
    answer = server.post(PATH, {"input": "fail", "stream": True})
    if answer.status_code != 200:  # it failed before the stream was opened
        assert "a scripted failure" in answer.json()["error"]["message"]
        return
    events = sent(answer.content)
    assert events[-1]["type"] == "response.failed"
    assert "a scripted failure" in events[-1]["response"]["error"]["message"]


def test_what_is_kept_is_bounded() -> None:
    kept = Conversations()
    for number in range(MAX_CONVERSATIONS + 5):
        kept.put("a", str(number), [Message("user", "a")])
    assert kept.get("a", "5") == [Message("user", "a")]
    with pytest.raises(Exception, match="no such response"):
        kept.get("a", "4")
    kept.put("a", "large", [Message("user", "a" * (33 << 20))])
    with pytest.raises(Exception, match="no such response"):
        kept.get("a", "large")


def test_who_fills_the_store_displaces_their_own() -> None:
    kept = Conversations()
    for number in range(10):
        kept.put("few", str(number), [Message("user", "a")])
    for number in range(2 * MAX_CONVERSATIONS):
        kept.put("many", str(number), [Message("user", "a")])
    assert kept.get("few", "0") and kept.get("many", str(MAX_CONVERSATIONS + 10))
    with pytest.raises(Exception, match="no such response"):
        kept.get("many", str(MAX_CONVERSATIONS))
    kept.put("few", "another", [Message("user", "b" * 1000)])  # there is room for who has little
    assert kept.get("few", "0") and kept.get("few", "another")


def test_a_conversation_is_its_keys_alone(start: Callable[..., Server], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-one\nsk-two\n")
    server = start(api_key_file=str(keys))
    one, two = (openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in ("sk-one", "sk-two"))
    first = one.responses.create(model="scripted", input="say:secret")
    with pytest.raises(openai.NotFoundError, match="no such response"):
        two.responses.create(model="scripted", input="say:a", previous_response_id=first.id)
    assert one.responses.create(model="scripted", input="say:b", previous_response_id=first.id).output_text == "b"
