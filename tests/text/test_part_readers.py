"""Calls and thoughts of every family: read whole, and cut anywhere, they are the same."""

# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from headway.text.part_readers import (
    BareJsonReader,
    DeepSeekReader,
    HarmonyReader,
    HermesReader,
    MistralReader,
    ThinkingReader,
)
from headway.text.parts import CallArguments, CallBegun, Part, PartParser, Said, Thought
from headway.text.python_calls import PythonReader, ToolCodeReader

TOOLS = ("weather", "now")
ARGUMENTS = '{"city": "Zürich {\\"a\\"}", "days": [1, {"n": 2}]}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
SEP, BEGIN, END = "<｜tool▁sep｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"

WEATHER = [CallBegun("weather"), CallArguments(ARGUMENTS)]
NOW = [CallBegun("now"), CallArguments("{}")]
Make = Callable[[], PartParser]


def bare() -> PartParser:
    return BareJsonReader(TOOLS)


CASES: list[tuple[Make, str, list[Part]]] = [
    (HermesReader, "Hello, <tool> world! ", [Said("Hello, <tool> world! ")]),
    (HermesReader, f"Let me see.\n\n<tool_call>\n{CALL}\n</tool_call>", [Said("Let me see."), *WEATHER]),
    (
        HermesReader,
        f'<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{{"name": "now", "arguments": {{}}}}</tool_call> Done',
        [*WEATHER, *NOW, Said(" Done")],
    ),
    (HermesReader, f'<tool_call>{{"arguments": {ARGUMENTS} , "name" : "weather"}}</tool_call>', WEATHER),
    (HermesReader, f'<tool_call>{{"id": "c1", "name": "weather", "arguments": {ARGUMENTS} }}</tool_call>',
     [CallBegun("weather", "c1"), CallArguments(ARGUMENTS)]),
    (HermesReader, '<tool_call>{"name": "now"}</tool_call>', NOW),
    (HermesReader, '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>',
     [CallBegun("now"), CallArguments('{"a": 1}')]),
    (HermesReader, '<tool_call>{"no": "name"}</tool_call>', [Said('{"no": "name"}')]),
    (HermesReader, '<tool_call>{"name": "weather", "arguments": {"city": "Zü', [CallBegun("weather"), CallArguments('{"city": "Zü')]),
    (HermesReader, "a <tool_ca", [Said("a <tool_ca")]),
    (bare, "It is sunny; {really}.", [Said("It is sunny; {really}.")]),
    (bare, f'{{"name": "weather", "parameters": {ARGUMENTS}}}', WEATHER),
    (bare, f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {ARGUMENTS}}}; {{"name": "now", "parameters": {{}}}}',
     [*WEATHER, *NOW]),
    (bare, '{"name": "Alice", "parameters": {}} is data', [Said('{"name": "Alice", "parameters": {}} is data')]),
    (PythonReader, "[weather(city='Rome', days=[1, 2], wet=False, sky=null), now()]",
     [CallBegun("weather"), CallArguments('{"city": "Rome", "days": [1, 2], "wet": false, "sky": null}'), *NOW]),
    (PythonReader, "<|python_start|>[now()]<|python_end|>", NOW),
    (PythonReader, "[1, 2] is a list", [Said("[1, 2] is a list")]),
    (PythonReader, "[now(__import__('os'))]", [Said("[now(__import__('os'))]")]),
    (PythonReader, "It is late.", [Said("It is late.")]),
    (ToolCodeReader, "Well.\n```tool_code\nprint(now())\n```", [Said("Well."), *NOW]),
    (ToolCodeReader, "```python\nnow()\n```", [Said("```python\nnow()\n```")]),
    (MistralReader, f'[TOOL_CALLS] [{CALL}, {{"name": "now", "arguments": {{}}, "id": "123456789"}}]',
     [*WEATHER, CallBegun("now"), CallArguments("{}")]),
    (MistralReader, f"Sure. [TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[CALL_ID]abc[ARGS]{{}}",
     [Said("Sure."), *WEATHER, CallBegun("now", "abc"), CallArguments("{}")]),
    (MistralReader, f"[TOOL_CALLS]weather{ARGUMENTS}", WEATHER),
    (DeepSeekReader, f"Yes.{ALL}{BEGIN}function{SEP}weather\n```json\n{ARGUMENTS}\n```{END}\n{BEGIN}function{SEP}now\n```json\n{{}}\n```{END}{ALL_END}",
     [Said("Yes."), *WEATHER, *NOW]),
    (DeepSeekReader, f"{ALL}{BEGIN}weather{SEP}{ARGUMENTS}{END}{BEGIN}now{SEP}{{}}{END}{ALL_END}", [*WEATHER, *NOW]),
    (HarmonyReader, f"<|channel|>analysis<|message|>Hm, weather.<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
     [Thought("Hm, weather."), *WEATHER]),
    (HarmonyReader, "<|channel|>final<|message|>It is 5 < 6.\n", [Said("It is 5 < 6.\n")]),
    (HarmonyReader, "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Hi", [Thought("So."), Said("Hi")]),
    (HarmonyReader, "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>", NOW),
    (lambda: ThinkingReader(None), "<think>\nWell, <b>.\n\n</think>\n\nHello", [Thought("Well, <b>."), Said("Hello")]),
    (lambda: ThinkingReader(None), "No thoughts <think>", [Said("No thoughts <think>")]),
    (lambda: ThinkingReader(None, begun=True), "Well.\n</think>\n\nHello", [Thought("Well."), Said("Hello")]),
    (lambda: ThinkingReader(None, begun=True), "Well, I was cut </thi", [Thought("Well, I was cut </thi")]),
    (lambda: ThinkingReader(HermesReader()), f"<think>\n\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>", WEATHER),
]  # fmt: skip


def merged(parts: Iterable[Part]) -> list[Part]:
    """Neighbouring pieces of one kind as one."""
    found: list[Any] = []
    for part in parts:
        if found and type(found[-1]) is type(part) and not isinstance(part, CallBegun):
            found[-1] = type(part)(found[-1].text + part.text)  # type: ignore[union-attr]
        else:
            found.append(part)
    return found


def read(make: Make, pieces: Iterable[str]) -> list[Part]:
    reader = make()
    parts = [part for piece in pieces for part in reader.push(piece)]
    return merged([*parts, *reader.flush()])


@pytest.mark.parametrize(
    ("make", "text", "expected"), CASES, ids=lambda value: value[:30] if isinstance(value, str) else ""
)
def test_every_cut_reads_the_same(make: Make, text: str, expected: list[Part]) -> None:
    assert read(make, [text]) == expected
    assert read(make, text) == expected  # character by character
    for at in range(1, len(text)):
        assert read(make, [text[:at], text[at:]]) == expected, text[:at]
    for size in (2, 3, 5, 7):
        assert read(make, [text[at : at + size] for at in range(0, len(text), size)]) == expected


@pytest.mark.parametrize("make", [case[0] for case in CASES[::3]])
def test_nothing_is_lost_however_odd(make: Make) -> None:
    """Any prefix of any of these texts can be read by any of the readers."""
    for _, text, _ in CASES:
        for at in range(0, len(text), 3):
            assert read(make, text[:at]) == read(make, [text[:at]])
