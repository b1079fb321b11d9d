"""Tools as most APIs take them: OpenAI's function objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from headway.core.errors import BadInput
from headway.serve.conversation import Tool

MAX_TOOLS = 512


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
