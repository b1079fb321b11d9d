"""Tools as most APIs take them: OpenAI's function objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headway.core.errors import BadInput, shown
from headway.serve.conversation import Tool, ToolChoice

MAX_TOOLS = 512
MODES = ("none", "auto", "required")


class ToolBody(msgspec.Struct, kw_only=True):
    """A tool the model may call."""

    type: str = "function"
    function: FunctionBody | None = None


class FunctionBody(msgspec.Struct, kw_only=True):
    """A function, with the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


def choice_of(
    mode: str | None, tools: Sequence[Tool], name: str | None = None, parallel: bool = True, field: str = "tool_choice"
) -> ToolChoice:
    """
    Args:
        mode: "none", "auto", "required"; None = not given. name: of the one tool to call.
        field: what the API calls it.

    Raises:
        BadInput: it is no choice, names a tool that there is not, or there is none to be called.
    """
    if name is not None:
        if name not in {tool.name for tool in tools}:
            raise BadInput(field, "it names no function of tools")
        return ToolChoice("required", name, parallel=parallel)
    if mode is None:
        return ToolChoice("auto" if tools else "none", parallel=parallel)
    if mode not in MODES:
        raise BadInput(field, f"{shown(mode)} is not {', '.join(MODES)}, or a function")
    if mode == "required" and not tools:
        raise BadInput(field, "there are no tools that could be called")
    return ToolChoice(mode, parallel=parallel)  # type: ignore[arg-type]


def tools_of(tools: Sequence[ToolBody] | None) -> tuple[Tool, ...]:
    """
    Raises:
        BadInput: one is no function, or there are too many.
    """
    if len(tools or ()) > MAX_TOOLS:
        raise BadInput("tools", f"{len(tools or ())} tools; at most {MAX_TOOLS} are accepted")
    found = []
    for index, tool in enumerate(tools or ()):
        function = tool.function
        if tool.type == "function" and function is None:
            raise BadInput(f"tools[{index}].function", "the field is required")
        if tool.type != "function" or function is None:
            raise BadInput(f"tools[{index}].type", f"{tool.type[:40]!r} is not supported by this server; use function")
        found.append(Tool(function.name, function.description or "", function.parameters or {}, bool(function.strict)))
    return tuple(found)
