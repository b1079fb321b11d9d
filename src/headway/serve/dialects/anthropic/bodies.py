"""Anthropic's request bodies as typed structs, and the conversation and sampling they ask for.

As everywhere, a field is honoured, refused with its name, or declared as without effect; `null` means "not given".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from headway.core.errors import BadInput
from headway.core.grammar import Grammar
from headway.core.request import MAX_INTEGER, SamplingParams
from headway.serve.conversation import Message, Reasoning, Tool, ToolCall, ToolChoice
from headway.serve.dialect import known_fields, refuse
from headway.serve.errors import ApiError
from headway.serve.structured import flat_format
from headway.serve.tools import MAX_TOOLS, choice_of

# Would change the answer, and are not built: refused unless null or one of these values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {"mcp_servers": ([],), "container": ()}
# Who asks, where and how it is billed, and what is cached: a prefix is cached here whether or not it is marked.
IGNORED = (
    "metadata", "service_tier", "cache_control", "inference_geo", "speed", "diagnostics", "user_profile_id",
    "workspace_id", "betas",
)  # fmt: skip
if TYPE_CHECKING:
    _Known = msgspec.Struct
else:
    _Known = known_fields(*IGNORED, *REFUSED)

# Claude Code's first system block: other with each request, so that no prefix would ever be found in the cache.
BILLING = "x-anthropic-billing-header"
KEEPS_ALL = {"clear_thinking_20251015"}  # edits of `context_management` that, with keep = "all", clear nothing


class Content(msgspec.Struct, kw_only=True):
    """A block of content. Other fields, such as cache_control and citations, are ignored; a type that is not built is
    refused by its name."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Content] | None = None


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """One turn."""

    role: str
    content: str | list[Content]


class ToolParam(msgspec.Struct, kw_only=True):
    """A tool the model may call, of other `type` where Anthropic runs it; other fields are ignored."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceParam(msgspec.Struct, kw_only=True):
    """`tool_choice`."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(msgspec.Struct, kw_only=True):
    """`thinking`."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    """`output_config`."""

    effort: str | None = None
    format: Any = None


class Edit(msgspec.Struct, kw_only=True):
    """One of `context_management`'s."""

    type: str
    keep: Any = None


class ContextManagement(msgspec.Struct, kw_only=True):
    edits: list[Edit] = []


class CountRequest(_Known, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages/count_tokens, and what POST /v1/messages has in common with it."""

    model: str | None = None
    messages: list[AnthropicMessage]
    system: str | list[Content] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    output_format: Any = None
    context_management: ContextManagement | None = None

    def check(self) -> None:
        """
        Raises:
            ApiError: a field asks for something this server cannot do.
        """
        refuse(self, REFUSED)
        for number, edit in enumerate(self.context_management.edits if self.context_management else ()):
            if edit.type not in KEEPS_ALL or edit.keep != "all":
                param = f"context_management.edits[{number}]"
                raise ApiError(400, f"{param}: not supported by this server; leave it out", param=param)

    def conversation(self) -> list[Message]:
        """
        Raises:
            HeadwayError: a role or a block this server does not know.
        """
        turns = [Message("system", text) for text in [self._system()] if text]
        for index, message in enumerate(self.messages):
            turns += _turns(message, f"messages[{index}]")
        return turns

    def _system(self) -> str:
        blocks = [Content(type="text", text=self.system)] if isinstance(self.system, str) else self.system or []
        texts = [_text(block, f"system[{number}]") for number, block in enumerate(blocks)]
        return "\n".join(text for text in texts if not text.startswith(BILLING))

    def tools_given(self) -> tuple[Tool, ...]:
        """
        Raises:
            BadInput: one is a tool that Anthropic runs, or there are too many.
        """
        tools = self.tools or []
        if len(tools) > MAX_TOOLS:
            raise BadInput("tools", f"{len(tools)} tools; at most {MAX_TOOLS} are accepted")
        for number, tool in enumerate(tools):
            if tool.type not in (None, "custom"):
                problem = f"{tool.type[:40]!r} is run by Anthropic, not by this server; use custom"
                raise BadInput(f"tools[{number}].type", problem)
            if tool.input_schema is None:
                raise BadInput(f"tools[{number}].input_schema", "the field is required")
        return tuple(
            Tool(tool.name, tool.description or "", tool.input_schema or {}, bool(tool.strict)) for tool in tools
        )

    def choice(self) -> ToolChoice:
        """
        Raises:
            BadInput: it is no choice, or names a tool that there is not.
        """
        given, tools = self.tool_choice, self.tools_given()
        if given is None:
            return choice_of(None, tools)
        parallel = not given.disable_parallel_tool_use
        if given.type == "tool":
            return choice_of(None, tools, given.name or "", parallel, "tool_choice.name")
        modes = {"auto": "auto", "none": "none", "any": "required"}
        if given.type not in modes:
            raise BadInput("tool_choice.type", f"{given.type[:40]!r} is not auto, any, tool, or none")
        return choice_of(modes[given.type], tools, parallel=parallel)

    def grammar(self) -> Grammar | None:
        """What `output_config.format`, or `output_format` as it was called before, asks for."""
        old = flat_format(self.output_format, "output_format")
        return old or flat_format(self.output_config.format if self.output_config else None, "output_config.format")

    def reasoning(self) -> Reasoning:
        """
        Raises:
            BadInput: `thinking` is of no type there is.
        """
        given, effort = self.thinking, self.output_config.effort if self.output_config else None
        if given is None:
            return Reasoning(effort=effort)
        if given.type not in ("enabled", "disabled", "adaptive", "between_tools"):
            raise BadInput("thinking.type", f"{given.type[:40]!r} is not enabled, disabled, adaptive or between_tools")
        budget = given.budget_tokens
        if (given.type == "enabled" or budget is not None) and not 0 < (budget or 0) <= MAX_INTEGER:
            raise BadInput("thinking.budget_tokens", f"give a number of tokens from 1 to {MAX_INTEGER}")
        shown = given.display != "omitted"
        return Reasoning(given.type != "disabled", given.budget_tokens, effort, shown)


class MessagesRequest(CountRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages."""

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """
        Raises:
            BadInput: a value is out of range.
        """
        given = {"max_tokens": self.max_tokens, "stop": tuple(self.stop_sequences or ()) or None}
        given |= {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        return defaults.but(given)


def _text(block: Content, where: str) -> str:
    if block.type != "text":
        problem = f"blocks of type {block.type[:40]!r} are not supported by this server; send text"
        raise ApiError(400, f"{where}: {problem}", param=where, code="unsupported")
    return _required(block.text, f"{where}.text")


def _required(value: str | None, where: str) -> str:
    if value is None:
        raise BadInput(where, "the field is required")
    return value


def _turns(message: AnthropicMessage, where: str) -> list[Message]:
    """A message's turns, which are several where it holds results of calls: each is a turn of its own."""
    if message.role not in ("user", "assistant", "system"):
        raise BadInput(f"{where}.role", "use user, assistant or system")
    if isinstance(message.content, str):
        return [Message(message.role, message.content)]
    if not message.content and message.role != "assistant":
        raise BadInput(f"{where}.content", "give a text, or a list of at least one block")
    places = [(block, f"{where}.content[{index}]") for index, block in enumerate(message.content)]
    return [_spoken(places)] if message.role == "assistant" else _asked(message.role, places)


def _spoken(places: list[tuple[Content, str]]) -> Message:
    """The assistant's turn. What was redacted cannot be read by anybody else, and has no text."""
    texts, thoughts, calls = [], [], []
    for block, where in places:
        if block.type == "thinking":
            thoughts.append(_required(block.thinking, f"{where}.thinking"))
        elif block.type == "tool_use":
            arguments = msgspec.json.encode(block.input or {}).decode()
            calls.append(
                ToolCall(_required(block.id, f"{where}.id"), _required(block.name, f"{where}.name"), arguments)
            )
        else:
            texts.append(_text(block, where))
    reasoning = "\n".join(thoughts) if thoughts else None
    return Message("assistant", "\n".join(texts), reasoning=reasoning, tool_calls=tuple(calls))


def _asked(role: str, places: list[tuple[Content, str]]) -> list[Message]:
    turns: list[Message] = []
    texts: list[str] = []
    for block, where in places:
        if block.type != "tool_result":
            texts.append(_text(block, where))
            continue
        if texts:
            turns.append(Message(role, "\n".join(texts)))
            texts = []
        id = _required(block.tool_use_id, f"{where}.tool_use_id")
        turns.append(Message("tool", _result(block.content, f"{where}.content"), tool_call_id=id))
    return [*turns, Message(role, "\n".join(texts))] if texts or not turns else turns


def _result(content: str | list[Content] | None, where: str) -> str:
    if not isinstance(content, list):
        return content or ""
    return "\n".join([_text(block, f"{where}[{index}]") for index, block in enumerate(content)])
