"""A verb's command line: run as it was typed, refused in one sentence where it is wrong, written down for reports."""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import typer
import typer.main

from headway.cli.config import with_config

UsageError: Any = typer.BadParameter.__mro__[1]  # typer has click in it, or beside it, by its version
ACCEPTED = {"int": "a whole number", "integer": "a whole number", "float": "a number", "boolean": "true or false"}


class App(Protocol):
    """What a verb's module calls `app`, where it is none of typer's."""

    def __call__(self, *, args: Sequence[str], prog_name: str, **settings: Any) -> Any: ...


def command_of(app: typer.Typer, *table: tuple[str, Collection[str]]) -> Any:
    """A verb as click runs it, with the options that every verb has. `table`: as of `with_config`."""
    command = typer.main.get_command(app)
    with_config(command, *table)
    return command


def start(app: typer.Typer | App, args: Sequence[str], verb: str, verbs: Collection[str]) -> int:
    """Run one of the verbs. -> its exit code; 2 after one sentence on stderr where its command line cannot be read."""
    name = f"headway {verb}"
    run = command_of(app, (verb, verbs)) if isinstance(app, typer.Typer) else app
    try:
        code = run(args=list(args), prog_name=name, standalone_mode=False, help_option_names=["-h", "--help"])
    except UsageError as error:
        command = error.ctx.command_path if error.ctx else name
        print(f"{name}: {sentence(error)}; see `{command} --help`", file=sys.stderr)
        return 2
    except typer.Abort:
        return 1
    return code if isinstance(code, int) else 0


def sentence(error: Any) -> str:
    """What is wrong with a command line: the option, what was given, and what is accepted."""
    if type(error).__name__ == "NoSuchOption":
        if error.option_name.startswith(("--ssl", "--tls")):
            return f"{error.option_name}: no such option; TLS is a proxy's work, see docs/deploy.md"
        near = difflib.get_close_matches(error.option_name, error.possibilities or (), 1)
        return f"{error.option_name}: no such option" + (f"; did you mean {near[0]}?" if near else "")
    if type(error).__name__ == "BadOptionUsage":
        return f"{error.option_name}: " + ("it takes no value" if "not take" in error.message else "a value is missing")
    parameter = getattr(error, "param", None)
    if parameter is None:
        hint = getattr(error, "param_hint", None)
        message = error.message[0].lower() + error.message[1:].rstrip(".")
        return f"{hint}: {message}" if hint else message
    named = (parameter.metavar or parameter.name).upper()
    flag = max(parameter.opts, key=len) if parameter.param_type_name == "option" else named
    if type(error).__name__ == "MissingParameter":
        return f"{flag}: missing"
    given, found, kind = error.message.rstrip(".").partition(" is not a valid ")
    return f"{flag}: {given}; accepted: {ACCEPTED[kind]}" if found and kind in ACCEPTED else f"{flag}: {error.message}"


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
