"""How model families write calls of tools: which format a chat template goes with, what reads it, and grammars that
leave the model no other way than to write it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from headway.core.errors import BadInput, shown
from headway.core.grammar import Grammar
from headway.text.grammar_worker import WHITESPACE
from headway.text.part_readers import (
    BareJsonReader,
    DeepSeekReader,
    HarmonyReader,
    HermesReader,
    MistralReader,
)
from headway.text.parts import PartParser
from headway.text.python_calls import PythonReader, ToolCodeReader


class Declared(Protocol):
    """A tool, as far as it matters here."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Shape:
    """The text of a call: `begin` NAME `middle` ARGUMENTS `end`; all calls after `opening`, `between` them, `closing`.

    Control tokens in it are written by their names.
    """

    begin: str
    middle: str
    end: str
    opening: str = ""
    between: str = "\n"
    closing: str = ""


@dataclass(frozen=True)
class ToolFormat:
    """One family's way.

    Attributes:
        name: of `--tool-parser`.
        marks: a chat template with any of these goes with it.
        read: makes a reader, from the names of the tools.
        shape: of calls that a grammar forces; every reader of the format reads them.
        trigger: what a call begins with wherever it stands; "" = a call is all there is.
        control: marks are control tokens, which a text would not show.
    """

    name: str
    marks: tuple[str, ...]
    read: Callable[[Sequence[str]], PartParser]
    shape: Shape
    trigger: str = ""
    control: bool = False


_JSON = ('{"name": "', '", "arguments": ', "}")
_HERMES = Shape("<tool_call>\n" + _JSON[0], _JSON[1], _JSON[2] + "\n</tool_call>")
_BARE = Shape('{"name": "', '", "parameters": ', "}", between="; ")
_HARMONY = Shape(
    "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>", between="<|start|>assistant"
)
_MISTRAL = Shape(_JSON[0], _JSON[1], _JSON[2], opening="[TOOL_CALLS][", between=", ", closing="]")
_MISTRAL_ARGS = Shape("[TOOL_CALLS]", "[ARGS]", "", between="")
_SEEK = DeepSeekReader
_DEEPSEEK = Shape(
    _SEEK.CALL + "function" + _SEEK.SEP, "\n```json\n", "\n```" + _SEEK.CALL_END,
    opening=_SEEK.BEGIN, closing=_SEEK.END,
)  # fmt: skip
_DEEPSEEK_31 = Shape(
    _SEEK.CALL, _SEEK.SEP, _SEEK.CALL_END, opening=_SEEK.BEGIN, between="", closing=_SEEK.END
)  # fmt: skip


def _any(reader: Callable[[], PartParser]) -> Callable[[Sequence[str]], PartParser]:
    """A reader that need not know the tools."""
    return lambda tools: reader()


FORMATS = (
    ToolFormat("harmony", ("<|channel|>",), _any(HarmonyReader), _HARMONY, control=True),
    ToolFormat("mistral-args", ("[ARGS]",), _any(MistralReader), _MISTRAL_ARGS, MistralReader.BEGIN, True),
    ToolFormat("mistral", ("[TOOL_CALLS]",), _any(MistralReader), _MISTRAL, MistralReader.BEGIN, True),
    ToolFormat("deepseek", (_SEEK.BEGIN + _SEEK.CALL + "function",), _any(_SEEK), _DEEPSEEK, _SEEK.BEGIN, True),
    ToolFormat("deepseek-v3.1", (_SEEK.BEGIN,), _any(_SEEK), _DEEPSEEK_31, _SEEK.BEGIN, True),
    ToolFormat("hermes", ("<tool_call>",), _any(HermesReader), _HERMES, HermesReader.BEGIN),
    ToolFormat("llama", ("<|python_tag|>", "<|start_header_id|>"), BareJsonReader, _BARE, control=True),
    ToolFormat("pythonic", ("<|python_start|>", "func_name1(params_name1"), _any(PythonReader), _BARE),
    ToolFormat("gemma", ("<start_of_turn>",), _any(ToolCodeReader), _BARE),
)
BY_NAME = {format.name: format for format in FORMATS}


def named(name: str) -> ToolFormat:
    """
    Raises:
        BadInput: there is none of that name.
    """
    if name not in BY_NAME:
        raise BadInput("--tool-parser", f"{shown(name)} is not one of {', '.join(BY_NAME)}")
    return BY_NAME[name]


def format_of(template: str) -> ToolFormat:
    """The one that a chat template goes with; Hermes', if nothing tells, and where the template knows nothing of tools:
    then the model is told of them in Hermes' words."""
    if "tools" not in template:
        return BY_NAME["hermes"]
    return next((one for one in FORMATS if any(mark in template for mark in one.marks)), BY_NAME["hermes"])


def forced_reader(format: ToolFormat, tools: Sequence[Declared]) -> PartParser:
    """Reads what `calls_grammar` allows."""
    names = [tool.name for tool in tools]
    return BareJsonReader(names) if format.shape is _BARE else format.read(names)


def calls_grammar(format: ToolFormat, tools: Sequence[Declared], control: Mapping[str, int], parallel: bool) -> Grammar:
    """One call of one of `tools` or, with `parallel`, several, whose arguments follow the tools' schemas; nothing else.

    Args:
        control: ids of the model's control tokens.
    """
    start = _row(_all_calls(format.shape, control, parallel))
    return Grammar("compiled", f"start: {start}\n{_call(format.shape, tools, control)}")


def calls_or_schema(
    format: ToolFormat, tools: Sequence[Declared], control: Mapping[str, int], schema: Any, parallel: bool
) -> Grammar:
    """Calls as of `calls_grammar`, or JSON that is valid by a schema; `forced_reader` reads both. Calls that are JSON
    themselves are so by a schema too, or nobody could tell after a bracket which of both it begins."""
    calls = _row(_all_calls(format.shape, control, parallel))
    final = _quoted("<|channel|>final<|message|>", control) if format.shape is _HARMONY else ""
    start = f"start: calls | answer\ncalls: {calls}\nanswer: {_row([final, _json(schema)])}"
    rules = _json_call(tools) if format.shape is _BARE else _call(format.shape, tools, control)
    return Grammar("compiled", f"{start}\n{rules}")


def free_grammar(
    format: ToolFormat, tools: Sequence[Declared], control: Mapping[str, int], parallel: bool = True
) -> Grammar | None:
    """Any text, in which calls may stand (without `parallel`, one at its end), whose arguments follow the schemas; None
    = nothing tells where a call begins, or it is written in no JSON."""
    shape, trigger = format.shape, format.trigger
    if not trigger:
        alone = {"harmony": _free_harmony, "llama": _free_bare}.get(format.name)
        return alone and Grammar("compiled", f"{alone(shape, control, parallel)}\n{_call(shape, tools, control)}")
    if shape.opening:
        rest = _quoted(shape.opening.removeprefix(trigger), control)
        body = _row([rest, _repeated(shape, control, parallel), _quoted(shape.closing, control)])
    else:
        shape, body = replace(shape, begin=shape.begin.removeprefix(trigger)), "call"
    if trigger in control:
        tag = f"tag: TEXT {_quoted(trigger, control)} {body}"
    else:
        tag = f"tag: begin {body}\nbegin[lazy]: TEXT {json.dumps(trigger)}"
    start = "tag* last" if parallel else "tag | last"
    free = f"start: {start}\nlast: TEXT\nTEXT: /(.|\\n)*/\n{tag}\n{_call(shape, tools, control)}"
    return Grammar("compiled", free)


def _free_bare(shape: Shape, control: Mapping[str, int], parallel: bool) -> str:
    """An answer that begins like an object is nothing but calls."""
    mark = f"({_quoted(BareJsonReader.BEGIN, control)})?" if BareJsonReader.BEGIN in control else ""
    calls = _row([mark, _repeated(shape, control, parallel)])
    return f"start: calls | TEXT\ncalls: {calls}\nTEXT: /\\s*([^\\s{{](.|\\n)*)?/"


def _free_harmony(shape: Shape, control: Mapping[str, int], parallel: bool) -> str:
    """Messages to the user and to itself, then one more, or calls."""
    begin, text, end = (_quoted(mark, control) for mark in ("<|channel|>", "<|message|>", "<|end|><|start|>assistant"))
    return "\n".join(
        [
            f"start: aside* (message | {_repeated(shape, control, parallel)})",
            f"aside: message {end}",
            f"message: {begin} CHANNEL {text} TEXT",
            "CHANNEL: /analysis|commentary|final/",
            "TEXT: /(.|\\n)*/",
        ]
    )


def _all_calls(shape: Shape, control: Mapping[str, int], parallel: bool) -> list[str]:
    return [_quoted(shape.opening, control), _repeated(shape, control, parallel), _quoted(shape.closing, control)]


def _repeated(shape: Shape, control: Mapping[str, int], parallel: bool) -> str:
    more = _row([_quoted(shape.between, control), "call"])
    return _row(["call", f"({more})*" if parallel else ""])


def _call(shape: Shape, tools: Sequence[Declared], control: Mapping[str, int]) -> str:
    """The rule `call`, one alternative per tool."""
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        before, after = _quoted(shape.begin + tool.name + shape.middle, control), _quoted(shape.end, control)
        rules.append(f"call_{number}: {_row([before, _json({'type': 'object', **tool.parameters}), after])}")
    return "\n".join(rules)


def _json(schema: Any) -> str:
    given = schema if isinstance(schema, Mapping) else {}
    return "%json " + json.dumps({**given, "x-guidance": {"whitespace_pattern": WHITESPACE}})


def _json_call(tools: Sequence[Declared]) -> str:
    """The rule `call` of `_BARE`, as schemas."""
    rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}"]
    for number, tool in enumerate(tools):
        inner = {"type": "object", **tool.parameters}
        shared = {key: inner.pop(key) for key in ("$defs", "definitions") if key in inner}  # references begin outside
        fields = {"name": {"const": tool.name}, "parameters": inner}
        whole = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
        rules.append(f"call_{number}: {_json({**whole, **shared})}")
    return "\n".join(rules)


def _row(parts: Sequence[str]) -> str:
    return " ".join(part for part in parts if part)


def _quoted(text: str, control: Mapping[str, int]) -> str:
    """As a grammar writes it: control tokens by number, the rest in quotes."""
    found = [(at, -len(name), name) for name in control if name and (at := text.find(name)) >= 0]
    if not found:
        return json.dumps(text) if text else ""
    at, _, name = min(found)
    return _row([_quoted(text[:at], {}), f"<[{control[name]}]>", _quoted(text[at + len(name) :], control)])
