"""What each API's events mean."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headway.bench.dialects import AnthropicMessages, OpenAIChat, OpenAICompletions
from headway.metrics.records import FailureKind, Kind, RequestRecord


def take(dialect: Any, *events: Any) -> tuple[RequestRecord, list[Any]]:
    record = RequestRecord(index=0, intended=0, max_tokens=64)
    failures = []
    for number, event in enumerate(events):
        data = event if isinstance(event, bytes) else json.dumps(event).encode()
        failures.append(dialect.interpret(data, number, number, record))
    return record, [failure for failure in failures if failure]


def delta(**fields: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


@pytest.mark.parametrize(
    ("event", "kinds"),
    [
        (delta(role="assistant", content=""), [Kind.ROLE]),
        (delta(role="assistant"), [Kind.ROLE]),
        (delta(content="hi"), [Kind.CONTENT]),
        (delta(reasoning_content="hm"), [Kind.REASONING]),
        (delta(reasoning="hm"), [Kind.REASONING]),
        (delta(reasoning="hm", reasoning_content="hm"), [Kind.REASONING]),
        (delta(reasoning="hm", content="hi"), [Kind.REASONING, Kind.CONTENT]),
        (delta(refusal="no"), [Kind.CONTENT]),
        (delta(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": "{"}}]), [Kind.TOOL]),
        ({"id": "x", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, [Kind.FINISH]),
        ({"id": "x", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}, [Kind.USAGE]),
        ({"id": "x", "choices": []}, []),
        (b"[DONE]", [Kind.DONE]),
        (b"[DONE] ", [Kind.DONE]),
    ],
)
def test_chat_events(event: Any, kinds: list[Kind]) -> None:
    record, failures = take(OpenAIChat(), event)
    assert [chunk.kind for chunk in record.chunks] == kinds
    assert not failures


def test_usage_is_read_with_its_details_and_unknown_fields_are_no_fault() -> None:
    usage = {
        "prompt_tokens": 10, "completion_tokens": 7, "total_tokens": 17, "extra": [1],
        "prompt_tokens_details": {"cached_tokens": 4, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 5},
    }  # fmt: skip
    record, _ = take(OpenAIChat(), {"choices": [], "usage": usage, "timings": {"cache_n": 1}})
    counts = (record.prompt_tokens, record.output_tokens, record.cached_tokens, record.reasoning_tokens)
    assert counts == (10, 7, 4, 5)


def test_usage_on_every_chunk_tells_the_tokens_of_each() -> None:
    first = {"choices": [{"delta": {"content": "a"}}], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}
    second = {"choices": [{"delta": {"content": "bcd"}}], "usage": {"prompt_tokens": 5, "completion_tokens": 4}}
    record, _ = take(OpenAIChat(), first, second)
    assert [chunk.tokens for chunk in record.chunks] == [1, 3]


def test_completions_events() -> None:
    events = ({"choices": [{"text": "a"}]}, {"choices": [{"text": "", "finish_reason": "length"}]})
    record, _ = take(OpenAICompletions(), *events)
    assert [chunk.kind for chunk in record.chunks] == [Kind.CONTENT, Kind.FINISH]
    assert record.finish_reason == "length"


def test_anthropic_stream() -> None:
    usage = {"input_tokens": 10, "cache_read_input_tokens": 30, "cache_creation_input_tokens": 2, "output_tokens": 1}
    record, failures = take(
        AnthropicMessages(),
        {"type": "message_start", "message": {"id": "m", "usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s"}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "hi"}},
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": "{"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 9}},
        {"type": "message_stop"},
    )
    assert not failures
    kinds = [Kind.ROLE, Kind.REASONING, Kind.CONTENT, Kind.TOOL, Kind.USAGE, Kind.DONE]
    assert [chunk.kind for chunk in record.chunks] == kinds
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (42, 30, 9)
    assert (record.finish_reason, record.server_id) == ("end_turn", "m")


@pytest.mark.parametrize(
    ("dialect", "event", "kind"),
    [
        (OpenAIChat(), {"error": {"message": "dead"}}, FailureKind.ERROR_EVENT),
        (OpenAIChat(), {"error": "dead"}, FailureKind.ERROR_EVENT),
        (OpenAIChat(), {"choices": "x"}, FailureKind.MALFORMED),
        (OpenAIChat(), b"{", FailureKind.MALFORMED),
        (OpenAIChat(), b"\xff\xfe", FailureKind.MALFORMED),
        (OpenAIChat(), {"choices": [{"delta": {"content": 5}}]}, FailureKind.MALFORMED),
        (AnthropicMessages(), {"type": "error", "error": {"type": "overloaded_error"}}, FailureKind.ERROR_EVENT),
        (AnthropicMessages(), {"no": "type"}, FailureKind.MALFORMED),
    ],
)
def test_faulty_events_are_named(dialect: Any, event: Any, kind: FailureKind) -> None:
    _, failures = take(dialect, event)
    assert [failure.kind for failure in failures] == [kind]


def test_null_error_is_no_error() -> None:
    _, failures = take(OpenAIChat(), {"error": None, "choices": [{"delta": {"content": "x"}}]})
    assert not failures
