"""How Anthropic writes answers: a message of blocks, or the events that build it.

    message_start (content_block_start content_block_delta* content_block_stop)* message_delta message_stop

A block is closed before the next one begins; their indices are dense.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

from headway.core.request import Finish
from headway.serve.answer import Answer
from headway.serve.choice import Block, Choice, Gain
from headway.serve.encode import Template, hole, json_bytes
from headway.serve.errors import ApiError, clean
from headway.text.parts import CallArguments, CallBegun, Part, Said, Thought

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
}

Fields = dict[str, Any]


def error_body(error: ApiError) -> Fields:
    kind = TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": clean(str(error))}}


def _event(fields: Fields) -> bytes:
    return b"event: " + fields["type"].encode() + b"\ndata: " + json_bytes(fields) + b"\n\n"


def signature(thinking: str) -> str:
    """Clients send it back with the thinking. Nothing here depends on it."""
    return hashlib.sha256(thinking.encode()).hexdigest()[:32]


class MessageFormat:
    """
    Args:
        shown: thinking is sent; else only that there was some.
    """

    stream_type = b"text/event-stream; charset=utf-8"
    keep_alive = b": keep-alive\n\n"

    def __init__(self, shown: bool, answer: Answer) -> None:
        self._shown = shown
        self._answer = answer
        self._started = False
        self._index = -1
        self._kind: Literal["text", "reasoning", "call"] | None = None  # of the block that is open
        self._thought: list[str] = []
        self._delta: Template | None = None  # of the open block, with a hole for its text

    def chunk(self, choice: Choice, gain: Gain) -> bytes:
        data = b"" if self._started else _event({"type": "message_start", "message": self._message([], None)})
        self._started = True
        for part in gain.parts:
            data += self._part(part)
        if gain.finish is not None:
            delta = {"stop_reason": self._reason(gain.finish), "stop_sequence": _sequence(gain.finish)}
            usage = self._usage()
            data += self._close() + _event({"type": "message_delta", "delta": delta, "usage": usage})
        return data

    def _part(self, part: Part) -> bytes:
        match part:
            case Said(text):
                return self._more("text", text, {"type": "text", "text": ""})
            case Thought(text):
                self._thought.append(text)
                block = {"type": "thinking", "thinking": "", "signature": ""}
                return self._more("reasoning", text if self._shown else "", block)
            case CallBegun(name, id):
                return self._open("call", {"type": "tool_use", "id": id, "name": name, "input": {}})
            case CallArguments(text):
                return self._more("call", text, {})

    def _more(self, kind: Literal["text", "reasoning", "call"], text: str, block: Fields) -> bytes:
        data = b"" if self._kind == kind else self._open(kind, block)
        assert self._delta is not None
        return data + self._delta.fill(json_bytes(text)) if text else data

    def _open(self, kind: Literal["text", "reasoning", "call"], block: Fields) -> bytes:
        data = self._close()
        self._kind = kind
        self._index += 1
        delta = {
            "text": {"type": "text_delta", "text": hole(0)},
            "reasoning": {"type": "thinking_delta", "thinking": hole(0)},
            "call": {"type": "input_json_delta", "partial_json": hole(0)},
        }[kind]
        self._delta = Template(_event({"type": "content_block_delta", "index": self._index, "delta": delta}), 1)
        return data + _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        data = b""
        if self._kind == "reasoning":
            delta = {"type": "signature_delta", "signature": signature("".join(self._thought))}
            data = _event({"type": "content_block_delta", "index": self._index, "delta": delta})
            self._thought = []
        self._kind = None
        return data + _event({"type": "content_block_stop", "index": self._index})

    def end(self) -> bytes:
        return _event({"type": "message_stop"})

    def failed(self, error: ApiError) -> bytes:
        return _event(error_body(error))

    def whole(self) -> list[bytes]:
        (choice,) = self._answer.choices
        return [json_bytes(self._message([self._block(block) for block in choice.blocks], choice.finish))]

    def _block(self, block: Block) -> Fields:
        if block.kind == "text":
            return {"type": "text", "text": block.text}
        if block.kind == "reasoning":
            thinking = block.text if self._shown else ""
            return {"type": "thinking", "thinking": thinking, "signature": signature(block.text)}
        return {"type": "tool_use", "id": block.id, "name": block.name, "input": block.arguments}

    def _message(self, content: list[Fields], finish: Finish | None) -> Fields:
        return {
            "id": self._answer.id,
            "type": "message",
            "role": "assistant",
            "model": self._answer.model,
            "content": content,
            "stop_reason": None if finish is None else self._reason(finish),
            "stop_sequence": None if finish is None else _sequence(finish),
            "usage": self._usage(),
        }

    def _usage(self) -> Fields:
        """Prompt tokens are those that the cache did not have, and those it had."""
        answer = self._answer
        return {
            "input_tokens": answer.prompt_tokens - answer.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": answer.cached_tokens,
            "output_tokens": answer.completion_tokens,
            **answer.bill,
        }

    def _reason(self, finish: Finish) -> str:
        if finish.reason == "tool_calls":
            return "tool_use"
        if finish.reason == "length":
            return "model_context_window_exceeded" if self._answer.cut_by_context else "max_tokens"
        return "end_turn" if _sequence(finish) is None else "stop_sequence"


def _sequence(finish: Finish) -> str | None:
    return finish.matched if finish.reason == "stop" and isinstance(finish.matched, str) else None
