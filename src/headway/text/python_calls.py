"""Calls of tools that a model writes as Python: read, never run."""

from __future__ import annotations

import ast
import json
from typing import Any

from headway.text.part_readers import Reader
from headway.text.parts import CallArguments, CallBegun, Part, Said

MOST_PYTHON = 64 << 10  # characters of a list of calls


class PythonReader(Reader):
    """Llama 4 and others: the whole answer is [name(argument=value, ...), ...]."""

    BEGIN, END = "<|python_start|>", "<|python_end|>"

    def __init__(self) -> None:
        super().__init__()
        self._state = self._opening
        self._code = ""

    def _opening(self) -> bool:
        self._skip()
        if self._text.startswith(self.BEGIN):
            self._text = self._text.removeprefix(self.BEGIN)
        elif self._text.startswith("["):
            self._state = self._listing
        elif self._text and (self._ended or not self.BEGIN.startswith(self._text)):
            self._state = self._saying
        else:
            return False
        return True

    def _listing(self) -> bool:
        self._code += self._text
        self._text = ""
        if not self._ended and len(self._code) <= MOST_PYTHON:
            return False
        end = self._code.rfind("]") + 1
        calls = _python_calls(self._code[:end]) if len(self._code) <= MOST_PYTHON else None
        rest = self._code[end:].replace(self.END, "").strip()
        self._add(calls if calls is not None and not rest else [Said(self._code)])
        self._code, self._state = "", self._saying
        return False


class ToolCodeReader(Reader):
    """Gemma: calls as Python in a block ```tool_code."""

    BEGIN, END = "```tool_code", "```"

    def _saying(self) -> bool:
        self._code = ""
        return self._said_until(self.BEGIN, self._coding)

    def _coding(self) -> bool:
        before, mark = self._until(self.END)
        self._code += before
        if not mark and not self._ended:
            return False
        calls = _python_calls(self._code) if len(self._code) <= MOST_PYTHON else None
        self._add(calls if calls is not None else [Said(self.BEGIN + self._code + mark)])
        self._state = self._saying
        return bool(mark)


def _python_calls(code: str) -> list[Part] | None:
    """Calls with literal arguments, in a list or on lines of their own -> their parts; None = it is nothing like it.
    Nothing is run: the text is parsed, and its literals are read."""
    try:
        tree = ast.parse(code.strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    calls: list[ast.expr] = []
    for line in tree.body:
        value = line.value if isinstance(line, ast.Expr | ast.Assign) else None
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "print" and value.args:
            value = value.args[0]
        if value is None:
            return None
        calls += value.elts if isinstance(value, ast.List) else [value]
    parts: list[Part] = []
    try:
        for call in calls:
            if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
                return None
            arguments = {word.arg: _literal(word.value) for word in call.keywords}
            parts += [CallBegun(ast.unparse(call.func)), CallArguments(json.dumps(arguments, ensure_ascii=False))]
    except (ValueError, RecursionError, TypeError):
        return None
    return parts or None


def _literal(node: ast.expr) -> Any:
    """A Python literal; JSON's names of constants are taken as well."""
    names = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(one) for one in node.elts]
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        return {_literal(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    return ast.literal_eval(node)
