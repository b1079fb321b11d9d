"""A conversation, whatever API it came in: turns, the tools a model may call, the calls it made."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from headway.core.errors import BadInput, shown

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class ToolCall:
    """A call that the assistant made.

    Attributes:
        id: by which its result refers to it.
        arguments: JSON text, as the model wrote it.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: one of `ROLES`.
        content: its text; of "tool", the result of a call.
        name: of the speaker; of "tool", the tool's, if it is known.
        reasoning: what the assistant thought before it spoke.
        tool_calls: those the assistant made.
        tool_call_id: of "tool": of the call that this is the result of.
    """

    role: str
    content: str
    name: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(frozen=True)
class Tool:
    """A function the model may call.

    Attributes:
        parameters: JSON schema of its arguments, an object's.
        strict: the arguments must follow the schema.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    def __post_init__(self) -> None:
        if not _TOOL_NAME.fullmatch(self.name):
            raise BadInput("tools", f"the name {shown(self.name)} is not 1 to 128 letters, digits, or any of _ - . : /")
        if self.parameters.get("type", "object") != "object":
            raise BadInput("tools", f"the parameters of {self.name} must be a schema of type object")


@dataclass(frozen=True)
class ToolChoice:
    """Whether tools are called.

    Attributes:
        mode: "none", "auto" (the model decides), or "required" (at least one).
        name: with "required": of the one tool to call; None = any.
        parallel: more than one call may be made.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    parallel: bool = True


AUTO = ToolChoice()


@dataclass(frozen=True)
class Reasoning:
    """Whether and how a model that can think before it speaks does so.

    Attributes:
        enabled: None = as the model does by itself.
        budget: most tokens of it; None = no limit of its own.
        effort: how much of it, in the API's words; None = as the model does by itself.
        shown: the answer has its text.
    """

    enabled: bool | None = None
    budget: int | None = None
    effort: str | None = None
    shown: bool = True

    def variables(self) -> dict[str, Any]:
        """What chat templates of such models call it; others do not look."""
        named = {} if self.enabled is None else {"enable_thinking": self.enabled}
        return named if self.effort in (None, "none") else {**named, "reasoning_effort": self.effort}


AS_IT_DOES = Reasoning()
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def effort(given: str | None, field: str) -> Reasoning:
    """How much a model is to think, in OpenAI's words; "none" turns it off where that is possible.

    Raises:
        BadInput: it is none of `EFFORTS`.
    """
    if given is not None and given not in EFFORTS:
        raise BadInput(field, f"{shown(given)} is not one of {', '.join(EFFORTS)}")
    return Reasoning(enabled=False if given == "none" else None, effort=given)


def template_messages(messages: Sequence[Message], knows_developer: bool) -> list[dict[str, Any]]:
    """Messages as a chat template takes them, which is as transformers gives them.

    The `developer` role becomes `system` where the template does not know it; then all system texts are joined into one
    first message, because templates accept a system message only there.
    """
    plain = [_plain(message) for message in messages]
    if knows_developer or not any(message["role"] == "developer" for message in plain):
        return plain
    system = [message["content"] for message in plain if message["role"] in ("system", "developer")]
    rest = [message for message in plain if message["role"] not in ("system", "developer")]
    return [{"role": "system", "content": "\n\n".join(system)}, *rest]


def _plain(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        plain["name"] = message.name
    if message.reasoning is not None:
        plain["reasoning_content"] = message.reasoning
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _plain_call(call: ToolCall) -> dict[str, Any]:
    """Arguments are an object to templates; a text that is none, as a model may write it, stays a text."""
    try:
        arguments = msgspec.json.decode(call.arguments)
    except msgspec.DecodeError:
        arguments = None
    function = {"name": call.name, "arguments": arguments if isinstance(arguments, dict) else call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Tools as a chat template takes them; None if there is none."""
    return [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
        }
        for tool in tools
    ] or None
