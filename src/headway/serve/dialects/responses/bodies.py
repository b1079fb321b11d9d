"""The Responses API's request bodies as typed structs, and the conversation and sampling they ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from headway.core.errors import BadInput
from headway.core.grammar import Grammar
from headway.core.request import SamplingParams
from headway.serve.conversation import Message, Reasoning, Tool, ToolCall, ToolChoice, effort
from headway.serve.dialect import known_fields, refuse
from headway.serve.errors import ApiError
from headway.serve.logprobs import asked
from headway.serve.structured import flat_format
from headway.serve.tools import MAX_TOOLS, choice_of

LOGPROBS = "message.output_text.logprobs"
# May be asked to be included, and is not there: reasoning is given as it is.
NEVER_THERE = ("reasoning.encrypted_content",)
REFUSED: dict[str, tuple[Any, ...]] = {
    "background": (False,), "conversation": (), "prompt": (), "truncation": ("disabled",), "moderation": (),
    "context_management": ([],),
}  # fmt: skip
IGNORED = (
    "metadata", "user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "max_tool_calls", "stream_options", "client_metadata",
)  # fmt: skip
if TYPE_CHECKING:
    _Known = msgspec.Struct
else:
    _Known = known_fields(*IGNORED, *REFUSED)


class InputPart(msgspec.Struct, kw_only=True):
    """A part of an item. Only texts are built; other types are refused by their name."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct, kw_only=True):
    """One item of `input`: a message, or what came of one before. Other fields are ignored."""

    type: str = "message"
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None


class FunctionTool(msgspec.Struct, kw_only=True):
    """A tool the model may call."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(msgspec.Struct, kw_only=True):
    """A `tool_choice` that names a function."""

    type: str
    name: str | None = None


class ReasoningParam(msgspec.Struct, kw_only=True):
    """`reasoning`; summaries are not made: its text is given."""

    effort: str | None = None


class TextParam(msgspec.Struct, kw_only=True):
    """`text`."""

    format: Any = None
    verbosity: str | None = None


class ResponsesRequest(_Known, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningParam | None = None
    text: TextParam | None = None

    def check(self) -> None:
        """
        Raises:
            ApiError: a field asks for something this server cannot do.
        """
        refuse(self, REFUSED)
        if self.text is not None:
            refuse(self.text, {"verbosity": ("medium",)}, "text.")
        for name in self.include or ():
            if name != LOGPROBS and name not in NEVER_THERE:
                raise BadInput("include", f"{name[:60]!r} is not supported by this server; leave it out")

    def alternatives(self) -> int | None:
        """How many likeliest alternatives to report per token; None = no logprobs at all."""
        return asked(bool(self.top_logprobs) or LOGPROBS in (self.include or ()), self.top_logprobs)

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """
        Raises:
            BadInput: a value is out of range.
        """
        given = {"temperature": self.temperature, "top_p": self.top_p, "logprobs": self.alternatives()}
        return defaults.but({**given, "max_tokens": self.max_output_tokens})

    def turns(self) -> list[Message]:
        """`input` as turns; what the assistant thought, said and called in one go is one turn.

        Raises:
            HeadwayError: an item this server does not know.
        """
        if isinstance(self.input, str):
            return [Message("user", self.input)]
        turns: list[Message] = []
        for index, item in enumerate(self.input):
            turn = _turn(item, f"input[{index}]")
            going_on = turn.role == "assistant" and bool(turns) and turns[-1].role == "assistant"
            if going_on and (turn.tool_calls or not turns[-1].content):
                turn = _joined(turns.pop(), turn)
            turns.append(turn)
        return turns

    def tools_given(self) -> tuple[Tool, ...]:
        """
        Raises:
            BadInput: one is a tool that OpenAI runs, or there are too many.
        """
        tools = self.tools or []
        if len(tools) > MAX_TOOLS:
            raise BadInput("tools", f"{len(tools)} tools; at most {MAX_TOOLS} are accepted")
        for number, tool in enumerate(tools):
            if tool.type != "function":
                problem = f"{tool.type[:40]!r} is not supported by this server; use function"
                raise BadInput(f"tools[{number}].type", problem)
            if not tool.name:
                raise BadInput(f"tools[{number}].name", "the field is required")
        return tuple(
            Tool(tool.name or "", tool.description or "", tool.parameters or {}, bool(tool.strict)) for tool in tools
        )

    def choice(self, tools: Sequence[Tool]) -> ToolChoice:
        """Errors as of `choice_of`."""
        given, several = self.tool_choice, self.parallel_tool_calls is not False
        if isinstance(given, NamedFunction):
            return choice_of(None, tools, (given.type == "function" and given.name) or "", several)
        return choice_of(given, tools, parallel=several)

    def grammar(self) -> Grammar | None:
        """What `text.format` asks for."""
        return flat_format(self.text.format if self.text else None, "text.format")

    def thinking(self) -> Reasoning:
        return effort(self.reasoning.effort if self.reasoning else None, "reasoning.effort")


def _joined(first: Message, second: Message) -> Message:
    thoughts = [text for text in (first.reasoning, second.reasoning) if text]
    return Message(
        "assistant",
        first.content + second.content,
        reasoning="\n".join(thoughts) or None,
        tool_calls=first.tool_calls + second.tool_calls,
    )


def _turn(item: Item, where: str) -> Message:
    match item.type:
        case "message":
            if item.role not in ("system", "developer", "user", "assistant"):
                raise BadInput(f"{where}.role", "use system, developer, user or assistant")
            if item.content == [] and item.role != "assistant":
                raise BadInput(f"{where}.content", "give a text, or a list of at least one part")
            return Message(item.role, _text(item.content, f"{where}.content"))
        case "function_call":
            id, name = _required(item.call_id, f"{where}.call_id"), _required(item.name, f"{where}.name")
            return Message("assistant", "", tool_calls=(ToolCall(id, name, item.arguments or "{}"),))
        case "function_call_output":
            id = _required(item.call_id, f"{where}.call_id")
            return Message("tool", _text(item.output, f"{where}.output"), tool_call_id=id)
        case "reasoning":
            text = _text(item.content or item.summary or [], f"{where}.content")
            return Message("assistant", "", reasoning=text or None)
        case _:
            problem = f"items of type {item.type[:40]!r} are not supported by this server"
            raise ApiError(400, f"{where}: {problem}", param=where, code="unsupported")


def _required(value: str | None, where: str) -> str:
    if value is None:
        raise BadInput(where, "the field is required")
    return value


def _text(content: str | list[InputPart] | None, where: str) -> str:
    if content is None:
        raise BadInput(where, "the field is required")
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if part.type not in ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"):
            problem = f"parts of type {part.type[:40]!r} are not supported by this server; send input_text"
            raise ApiError(400, f"{place}: {problem}", param=place, code="unsupported")
        texts.append(_required(part.refusal if part.type == "refusal" else part.text, f"{place}.text"))
    return "\n".join(texts)


def answered(turns: Sequence[Message], blocks: Sequence[Any]) -> list[Message]:
    """A conversation with the answer to it, for a request that goes on from there."""
    texts = ["".join(block.text for block in blocks if block.kind == kind) for kind in ("text", "reasoning")]
    calls = tuple(ToolCall(block.id, block.name, block.text) for block in blocks if block.kind == "call")
    return [*turns, Message("assistant", texts[0], reasoning=texts[1] or None, tool_calls=calls)]
