"""Anthropic's API: its own client against the scripted model and the built-in one, and what the wire looks like."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import anthropic
import httpx
import pytest

from headway.serve.dialects.anthropic.format import MessageFormat
from tests.serve.conftest import Server
from tests.serve.test_conversation import answered

HELLO: Any = [{"role": "user", "content": "say:Hällo 🙂"}]
PATH = "/v1/messages"
ASK: dict[str, Any] = {"model": "scripted", "max_tokens": 64, "messages": HELLO}


def sdk_of(server: Server, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, **options)


@pytest.fixture
def sdk(server: Server) -> anthropic.Anthropic:
    return sdk_of(server)


def sent(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream; checks that each is called what its data says."""
    found = []
    for block in response.content.decode().strip().split("\n\n"):
        name, data = (line.partition(": ")[2] for line in block.split("\n"))
        found.append(json.loads(data))
        assert found[-1]["type"] == name
    return found


def test_the_client_talks(sdk: anthropic.Anthropic) -> None:
    answer = sdk.messages.create(model="scripted", max_tokens=64, messages=HELLO, system="Be brief.")
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "Hällo 🙂"}]
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("end_turn", None, "assistant")
    assert answer.usage.output_tokens == len("Hällo 🙂".encode()) + 1
    assert answer._request_id and answer.id.startswith("msg_")


def test_one_model_need_not_be_named(server: Server) -> None:
    body = {name: value for name, value in ASK.items() if name != "model"}
    answer = server.post(PATH, body)
    assert answer.status_code == 200 and answer.json()["model"] == "scripted"
    assert server.post(f"{PATH}/count_tokens", {"messages": HELLO}).status_code == 200


def test_the_client_streams(sdk: anthropic.Anthropic) -> None:
    with sdk.messages.stream(model="scripted", max_tokens=64, messages=HELLO) as stream:
        assert "".join(stream.text_stream) == "Hällo 🙂"
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn" and final.usage.output_tokens == len("Hällo 🙂".encode()) + 1
    assert final.usage.input_tokens > 0


def test_events_come_in_order(server: Server) -> None:
    events = sent(server.post(PATH, {**ASK, "stream": True}))
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None and message["usage"]["input_tokens"] > 0
    assert events[1]["content_block"] == {"type": "text", "text": ""}
    assert "".join(event["delta"]["text"] for event in events[2:-3]) == "Hällo 🙂"
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_blocks_of_a_stream_are_closed_before_the_next_begins() -> None:
    make = partial(MessageFormat, True)
    answer, choice, pieces = answered(make, "thm,tm", "xhi", 'cweather,a{"city"', "a:1}")
    events = [json.loads(block.split("data: ")[1]) for block in b"".join(pieces).decode().strip().split("\n\n")]
    shape = [(e["type"].removeprefix("content_block_"), e.get("index")) for e in events[1:-2]]
    assert shape == [
        ("start", 0), ("delta", 0), ("delta", 0), ("delta", 0), ("stop", 0),
        ("start", 1), ("delta", 1), ("stop", 1),
        ("start", 2), ("delta", 2), ("delta", 2), ("stop", 2),
        ("start", 3), ("delta", 3), ("stop", 3),
    ]  # fmt: skip
    kinds = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert kinds[:4] == ["thinking_delta", "thinking_delta", "signature_delta", "text_delta"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    whole = json.loads(b"".join(make(answer).whole()))
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "text"]
    assert whole["content"][2]["input"] == {"city": 1} and whole["content"][2]["id"] == choice.called[0].id
    signatures = [event["delta"].get("signature") for event in events if "delta" in event]
    assert whole["content"][0]["signature"] in signatures


def test_thinking_that_is_not_wanted_is_not_sent() -> None:
    make = partial(MessageFormat, False)
    answer, _, pieces = answered(make, "thm", "xhi")
    assert b"hm" not in b"".join(pieces).replace(b"thm", b"")
    assert json.loads(b"".join(make(answer).whole()))["content"][0]["thinking"] == ""


def test_why_it_stopped(server: Server) -> None:
    def asked(**fields: Any) -> dict[str, Any]:
        return server.post(PATH, {**ASK, **fields}).json()

    stopped = asked(stop_sequences=["🙂", "zzz"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "🙂")
    assert stopped["content"] == [{"type": "text", "text": "Hällo "}]
    assert asked(max_tokens=2)["stop_reason"] == "max_tokens"
    full = asked(max_tokens=32000, messages=[{"role": "user", "content": "count"}])
    assert full["stop_reason"] == "model_context_window_exceeded"
    usage = full["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"] == 4096


def test_blocks_of_a_conversation(server: Server) -> None:
    """Each block reaches the template; what a cached prefix saved is said."""
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=abc"},
        {"type": "text", "text": "Be brief. " * 40, "cache_control": {"type": "ephemeral"}},
    ]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Rain?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "redacted_thinking", "data": "x"}]},
    ]  # fmt: skip
    refused = server.post(PATH, {**ASK, "system": system, "messages": messages})
    assert refused.status_code == 400 and "redacted_thinking" in refused.json()["error"]["message"]
    messages = [
        messages[0],
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather",
                                            "input": {"city": "Bonn"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "yes"}]},
            {"type": "text", "text": "say:ok"}]},
    ]  # fmt: skip
    for cached in (False, True):
        system[0]["text"] += str(cached)
        answer = server.post(PATH, {**ASK, "system": system, "messages": messages}).json()
        assert answer["content"][0]["text"] == "ok"
        assert (answer["usage"]["cache_read_input_tokens"] > 300) == cached
        total = answer["usage"]["cache_read_input_tokens"] + answer["usage"]["input_tokens"]
        count = {"model": "scripted", "system": system, "messages": messages}
        assert server.post(f"{PATH}/count_tokens", count).json() == {"input_tokens": total}


def test_counts_are_the_clients(sdk: anthropic.Anthropic) -> None:
    counted = sdk.messages.count_tokens(model="scripted", messages=HELLO)
    answer = sdk.messages.create(model="scripted", max_tokens=2, messages=HELLO)
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_the_client_lists_models(sdk: anthropic.Anthropic) -> None:
    assert [(model.id, model.display_name, model.type) for model in sdk.models.list()] == [
        ("scripted", "scripted", "model")
    ]
    assert sdk.models.retrieve("scripted").created_at.year > 2020


def test_what_claude_code_sends(server: Server) -> None:
    body = {
        **ASK,
        "max_tokens": 32000,
        "stream": True,
        "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "temperature": 1,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x", "x-api-key": "none"}
    events = sent(server.post(PATH + "?beta=true", body, headers=headers))
    assert events[-1]["type"] == "message_stop"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2**64}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": []}, "messages"),
    ],
    ids=str,
)
def test_what_is_at_fault_is_named(server: Server, fields: dict[str, Any], named: str) -> None:
    refused = server.post(PATH, {**ASK, **fields})
    assert refused.status_code == 400
    body = refused.json()
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith(named)
    assert refused.headers["request-id"] == refused.headers["x-request-id"]


def test_errors_are_the_clients(sdk: anthropic.Anthropic, start: Any, tmp_path: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        sdk.messages.create(model="other", max_tokens=3, messages=HELLO)
    assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.APIStatusError, match="a scripted failure"):
        list(sdk.messages.create(model="scripted", max_tokens=9, messages=[{"role": "user", "content": "fail"}],
                                 stream=True))  # fmt: skip
    keys = tmp_path / "keys"
    keys.write_text("sesame\n")
    locked = start(api_key_file=str(keys))
    with pytest.raises(anthropic.AuthenticationError) as wrong:
        sdk_of(locked).messages.create(model="scripted", max_tokens=3, messages=HELLO)
    assert wrong.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    for options in ({"api_key": "sesame"}, {"auth_token": "sesame", "api_key": None}):
        client = anthropic.Anthropic(base_url=locked.url, max_retries=0, **options)
        assert client.messages.create(model="scripted", max_tokens=64, messages=HELLO).stop_reason == "end_turn"


def test_the_built_in_model_answers_the_same_whole_and_streamed(demo: Server) -> None:
    sdk = sdk_of(demo)
    fields: Any = {
        "model": "demo", "max_tokens": 24, "system": "Answer in one word.",
        "messages": [{"role": "user", "content": "What is the capital of France?"}], "extra_body": {"temperature": 0},
    }  # fmt: skip
    whole = sdk.messages.create(**fields)
    with sdk.messages.stream(**fields) as stream:
        assert stream.get_final_text() == whole.content[0].text  # type: ignore[union-attr]
    assert "Paris" in whole.content[0].text  # type: ignore[union-attr]
    begun = {"role": "assistant", "content": "The capital of France is"}
    prefilled = sdk.messages.create(**{**fields, "messages": [*fields["messages"], begun]})
    assert prefilled.content[0].text.startswith(" Paris")  # type: ignore[union-attr]
