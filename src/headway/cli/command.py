"""The command line as it was typed, for reports that say how they were made."""

from __future__ import annotations

import shlex

import typer


def command_line(typed: typer.Context) -> str:
    """The command as it was typed: its name, and the options that are not at their defaults."""
    words = typed.command_path.split()
    for parameter in typed.command.params:
        value = typed.params.get(str(parameter.name))
        if value in (parameter.default, None, ""):
            continue
        if isinstance(value, bool):
            words.append((parameter.opts if value else parameter.secondary_opts)[0])
            continue
        flag = [parameter.opts[0]] if parameter.param_type_name == "option" else []
        words += [*flag, f"{value:.12g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)
