"""OpenAI's messages and tools, and the conversation they are."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from headway.core.errors import BadInput
from headway.serve import conversation as neutral
from headway.serve.conversation import ROLES, Tool, ToolCall, ToolChoice
from headway.serve.errors import ApiError
from headway.serve.tools import choice_of


class Message(msgspec.Struct, kw_only=True):
    """One turn of a conversation. Other fields are ignored: clients send back what they keep with a turn."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    function_call: Any = None
    audio: Any = None


class Part(msgspec.Struct, kw_only=True):
    """A content part. Only texts are built, a refusal's too; other types are refused by their name, whatever else they
    hold."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Call(msgspec.Struct, kw_only=True):
    """A call of a tool that the assistant made."""

    id: str | None = None
    type: str = "function"
    function: CalledFunction | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    """`arguments` is JSON text."""

    name: str
    arguments: str | None = None


class NamedTool(msgspec.Struct, kw_only=True):
    """A `tool_choice` that names a function."""

    type: str = "function"
    function: FunctionName | None = None


class FunctionName(msgspec.Struct, kw_only=True):
    name: str


def conversation(messages: Sequence[Message]) -> list[neutral.Message]:
    """
    Raises:
        ApiError: a role or a content part this server does not know.
    """
    return [_turn(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _turn(message: Message, where: str) -> neutral.Message:
    if message.role not in ROLES:
        problem = "use tool_calls and the role tool" if message.role == "function" else "unknown role"
        raise ApiError(
            400, f"{where}.role: {problem}; use one of {', '.join(ROLES)}", param=f"{where}.role", code="invalid_value"
        )
    for field in ("function_call", "audio"):
        if getattr(message, field) not in (None, []):
            param = f"{where}.{field}"
            raise ApiError(400, f"{param}: not supported by this server; leave it out", param=param, code="unsupported")
    content = message.content if message.content is not None else message.refusal
    if content is None and message.role != "assistant":
        raise BadInput(f"{where}.content", "the field is required")
    if content == [] and message.role not in ("assistant", "tool"):
        raise BadInput(f"{where}.content", "give a text, or a list of at least one part")
    if message.tool_calls and message.role != "assistant":
        raise BadInput(f"{where}.tool_calls", f"only the assistant makes calls, not {message.role!r}")
    if message.role == "tool" and message.tool_call_id is None:
        raise BadInput(f"{where}.tool_call_id", "the field is required with role tool")
    return neutral.Message(
        message.role,
        _content(content, f"{where}.content"),
        message.name,
        message.reasoning_content if message.reasoning_content is not None else message.reasoning,
        tuple(_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(message.tool_calls or ())),
        message.tool_call_id if message.role == "tool" else None,
    )


def _content(content: str | list[Part] | None, where: str) -> str:
    if not isinstance(content, list):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        param = f"{where}[{index}]"
        if part.type not in ("text", "refusal"):
            problem = f"parts of type {part.type[:40]!r} are not supported by this server; send text"
            raise ApiError(400, f"{param}: {problem}", param=param, code="unsupported")
        text = part.text if part.type == "text" else part.refusal
        if text is None:
            raise BadInput(f"{param}.{part.type}", "the field is required")
        texts.append(text)
    return "\n".join(texts)  # as the Python API and vLLM do


def _call(call: Call, where: str) -> ToolCall:
    if call.type != "function" or call.function is None:
        raise BadInput(where, "a call has type function, and a function")
    return ToolCall(call.id or f"call_{secrets.token_hex(12)}", call.function.name, call.function.arguments or "{}")


def tool_choice_of(choice: str | NamedTool | None, parallel: bool | None, tools: Sequence[Tool]) -> ToolChoice:
    """Errors as of `choice_of`."""
    if isinstance(choice, NamedTool):
        return choice_of(None, tools, choice.function.name if choice.function else "", parallel is not False)
    return choice_of(choice, tools, parallel=parallel is not False)
