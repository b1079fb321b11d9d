"""Queries with tools, and models that think: what the model is told, what it may write, and who reads it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from headway.core.errors import BadInput
from headway.core.grammar import Grammar
from headway.core.request import SamplingParams
from headway.core.thinking import Thinking
from headway.serve.answer import Query
from headway.serve.conversation import Message, Tool, ToolChoice, template_tools
from headway.text.part_readers import Plain, ThinkingReader
from headway.text.parts import PartParser
from headway.text.thinking import HARMONY, MARKS, begun, thinking_of
from headway.text.tool_formats import ToolFormat, calls_grammar, calls_or_schema, forced_reader, free_grammar

_INSTRUCTIONS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


class Reads(Protocol):
    """What is looked at of a model's text side."""

    @property
    def template(self) -> str: ...

    @property
    def tool_format(self) -> ToolFormat: ...

    def encode(self, text: str, add_special: bool = True) -> list[int]: ...

    @property
    def control_tokens(self) -> Mapping[str, int]: ...


def offered(tools: Sequence[Tool], choice: ToolChoice) -> tuple[Tool, ...]:
    """The tools the model is told of: all, or the one it must call."""
    if choice.mode == "none":
        return ()
    named = tuple(tool for tool in tools if choice.name in (None, tool.name))
    if choice.mode == "required" and not named:
        raise BadInput("tool_choice", f"{choice.name!r} is not among tools" if choice.name else "there are no tools")
    return named


def told(messages: Sequence[Message], tools: Sequence[Tool], text: Reads) -> tuple[Sequence[Message], Sequence[Tool]]:
    """Messages and tools for the chat template; one that knows nothing of tools gets them, their calls and their
    results as texts, in Hermes' words."""
    speaks = any(message.tool_calls or message.role == "tool" for message in messages)
    if "tools" in text.template or not (tools or speaks):
        return messages, tools
    turns = [_as_text(message) for message in messages]
    if not tools:
        return turns, ()
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in template_tools(tools) or ())
    words = _INSTRUCTIONS.format(tools=listed)
    if turns and turns[0].role == "system":
        first = dataclasses.replace(turns[0], content=f"{turns[0].content}\n\n{words}")
        return [first, *turns[1:]], ()
    return [Message("system", words), *turns], ()


def _as_text(message: Message) -> Message:
    if message.role == "tool":
        return Message("user", f"<tool_response>\n{message.content}\n</tool_response>")
    if not message.tool_calls:
        return message
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {call.arguments or "{}"}}}\n</tool_call>'
        for call in message.tool_calls
    ]
    content = "\n".join([*([message.content] if message.content else []), *calls])
    return dataclasses.replace(message, content=content, tool_calls=())


def bound(query: Query, tools: Sequence[Tool], text: Reads, tail: str) -> Query:
    """The query with what its choices must follow and who reads them.

    Args:
        tools: those offered.
        tail: the end of the prompt, control tokens by name.

    Raises:
        BadInput: two fields ask for what cannot be had together.
    """
    format, params, field = text.tool_format, query.params, query.grammar_field
    names = [tool.name for tool in tools]
    harmony = HARMONY in text.template
    make: Callable[[], PartParser] = (lambda: format.read(names)) if tools or harmony else Plain
    if tools:
        grammar = _grammar(query, tools, text)
        if query.tool_choice.mode == "required" or params.grammar is not None:
            make = partial(forced_reader, format, tools)
        params, field = replace(params, grammar=grammar), field if grammar is None else "tools"
    whole = harmony and bool(tools) and params.grammar is not None  # the grammar is of reasoning, too
    if whole and query.tool_choice.mode == "auto" and (params.thinking_budget or query.reasoning.budget) is not None:
        raise BadInput("tools", "this model's calls are not held to schemas together with a budget of its reasoning")
    thinking = None if whole else _thinking(query, params, text, tail)
    if MARKS[0] in text.template and not harmony and (thinking is not None or params.grammar is None):
        make = partial(_thinking_reader, make, begun(tail))
    if make is Plain:
        return query
    visible = harmony or (format.control and bool(tools))
    params = replace(params, thinking=thinking, skip_special_tokens=params.skip_special_tokens and not visible)
    return dataclasses.replace(query, params=params, parser=make, grammar_field=field)


def _grammar(query: Query, tools: Sequence[Tool], text: Reads) -> Grammar | None:
    """What holds calls to their schemas, and the answer, where there is none, to its own; None = the model may write
    what it likes.

    Raises:
        BadInput: the answer is to follow something else than a schema.
    """
    choice, asked = query.tool_choice, query.params.grammar
    if choice.mode == "required":  # then there is no other answer
        parallel = choice.parallel and choice.name is None
        return calls_grammar(text.tool_format, tools, text.control_tokens, parallel)
    if asked is not None:
        if asked.kind != "json_schema":
            raise BadInput(query.grammar_field, "together with tools only a JSON schema is followed")
        schema = json.loads(asked.source)
        if schema is False:
            raise BadInput(query.grammar_field, "no JSON is valid by it")
        return calls_or_schema(text.tool_format, tools, text.control_tokens, schema, choice.parallel)
    if choice.parallel and not any(tool.strict for tool in tools):
        return None
    return free_grammar(text.tool_format, tools, text.control_tokens, choice.parallel)


def _thinking(query: Query, params: SamplingParams, text: Reads, tail: str) -> Thinking | None:
    """How the reasoning is followed, if it must be: it has a budget, or a grammar binds what comes after it."""
    budget = params.thinking_budget if query.reasoning.budget is None else query.reasoning.budget
    off = query.reasoning.enabled is False and not begun(tail)
    if off or (budget is None and params.grammar is None):
        return None
    return thinking_of(text.template, lambda mark: text.encode(mark, False), tail, budget)


def _thinking_reader(make: Callable[[], PartParser], has_begun: bool) -> ThinkingReader:
    return ThinkingReader(make(), has_begun, MARKS)
