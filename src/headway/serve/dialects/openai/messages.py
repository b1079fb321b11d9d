"""OpenAI's messages, and the conversation they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headway.core.errors import BadInput
from headway.serve import answer
from headway.serve.errors import ApiError
from headway.serve.text import ROLES


class Message(msgspec.Struct, kw_only=True):
    """One turn of a conversation. Other fields are ignored: clients send back what they keep with a turn."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None
    tool_call_id: Any = None
    function_call: Any = None
    audio: Any = None


class Part(msgspec.Struct, kw_only=True):
    """A content part. Only text is built; other types are refused by their name, whatever else they hold."""

    type: str
    text: str | None = None


def conversation(messages: Sequence[Message]) -> list[answer.Message]:
    """
    Raises:
        ApiError: a role or a content part this server does not know, or tool calls.
    """
    return [_turn(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _turn(message: Message, where: str) -> answer.Message:
    if message.role not in ROLES:
        problem = "tools are not supported by this server" if message.role in ("tool", "function") else "unknown role"
        raise ApiError(
            400, f"{where}.role: {problem}; use one of {', '.join(ROLES)}", param=f"{where}.role", code="invalid_value"
        )
    for field in ("tool_calls", "tool_call_id", "function_call", "audio"):
        if getattr(message, field) not in (None, []):
            param = f"{where}.{field}"
            raise ApiError(400, f"{param}: not supported by this server; leave it out", param=param, code="unsupported")
    if message.content is None and message.role != "assistant":
        raise BadInput(f"{where}.content", "the field is required")
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    return answer.Message(message.role, _content(message, f"{where}.content"), message.name, reasoning)


def _content(message: Message, where: str) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    texts = []
    for index, part in enumerate(message.content):
        param = f"{where}[{index}]"
        if part.type != "text":
            problem = f"parts of type {part.type[:40]!r} are not supported by this server; send text"
            raise ApiError(400, f"{param}: {problem}", param=param, code="unsupported")
        if part.text is None:
            raise BadInput(f"{param}.text", "the field is required")
        texts.append(part.text)
    return "\n".join(texts)  # as the Python API and vLLM do
