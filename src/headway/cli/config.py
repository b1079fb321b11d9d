"""`--config FILE.toml`: options of verbs, kept in a file. The command line goes before it, and it before defaults.

[serve]                      # a table per verb
model = ["demo"]
port = 8001                  # the option's long name, with - or _
api-key-file = "/etc/headway/keys"

[simulate.lesson]            # and per command of a verb
name = "batching"
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from typer.core import TyperOption

from headway.core.errors import BadInput, shown
from headway.core.toml_file import read_toml

FLAG = "--config"
HELP = "TOML file of options, in a table per verb, here `{verb}`. What the command line says goes before it."


def with_config(command: Any, *table: tuple[str, Collection[str]]) -> None:
    """Give a verb's command the option `--config`.

    Args:
        table: where a file has its options, from the outside: the name, and all names that there are beside it.
    """
    verb = ".".join(name for name, _ in table)

    def read(context: Any, parameter: Any, path: Path | None) -> None:
        if path is not None and not context.resilient_parsing:
            found: Any = read_toml(path, FLAG)
            for name, known in table:
                for other in (found if isinstance(found, dict) else {}).keys() - set(known):
                    what = "a table per verb" if isinstance(found[other], dict) else "options in the table of a verb"
                    raise _unknown(path, other, known, f"it holds {what}")
                found = found.get(name, {}) if isinstance(found, dict) else found
            context.default_map = _defaults(context, command, found, path, verb)

    option = TyperOption(
        param_decls=[FLAG], type=Path, metavar="FILE", expose_value=False, is_eager=True, callback=read,
        help=HELP.format(verb=verb),
    )  # fmt: skip
    command.params.append(option)


def _defaults(context: Any, command: Any, table: Any, path: Path, where: str) -> dict[str, Any]:
    """What click takes in place of defaults: values by parameter, tables by command."""
    if not isinstance(table, dict):
        raise BadInput(FLAG, f"{path}: {where} is {shown(table)}; accepted: a table, [{where}]")
    parameters = {name: one for one in command.params for name in _names(one)}
    commands: Mapping[str, Any] = getattr(command, "commands", {})
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if isinstance(value, dict) and key in commands:
            found[key] = _defaults(context, commands[key], value, path, f"{where}.{key}")
        elif name not in parameters:
            raise _unknown(path, f"{where}.{key}", [*parameters, *commands], f"there is none in [{where}]")
        elif parameters[name].name in found:
            raise BadInput(FLAG, f"{path}: {where}.{key} stands twice")
        else:
            found[parameters[name].name] = _value(context, parameters[name], value, f"{path}: {where}.{key}")
    return found


def _names(parameter: Any) -> list[str]:
    """What a file calls a parameter: an option's long name, an argument's own; what only shows help has none."""
    if parameter.param_type_name != "option":
        return [parameter.name]
    return [flag[2:].replace("-", "_") for flag in parameter.opts if flag.startswith("--") and parameter.expose_value]


def _value(context: Any, parameter: Any, value: Any, where: str) -> Any:
    """As the command line would give it: texts, which the option then reads; true or false of what is on or off."""
    several = parameter.nargs == -1 or getattr(parameter, "multiple", False)
    given = value if isinstance(value, list) else [value]
    kinds: tuple[type, ...] = (bool,) if getattr(parameter, "is_flag", False) else (str, int, float)
    if (isinstance(value, list) and not several) or not all(
        isinstance(one, kinds) and isinstance(one, bool) == (kinds == (bool,)) for one in given
    ):
        accepted = "true or false" if kinds == (bool,) else "a text or a number" + (", or a list of them" * several)
        raise BadInput(FLAG, f"{where}: {shown(value)} is not {accepted}")
    if any(isinstance(one, str) and "\0" in one for one in given):
        raise BadInput(FLAG, f"{where}: {shown(value)} holds a NUL character")
    texts = [one if isinstance(one, bool) else str(one) for one in given]
    found: Any = texts if several else texts[0]
    try:
        parameter.type_cast_value(context, found)
    except Exception as error:  # click's own, whose class is not the same in every version of typer
        if not hasattr(error, "message"):
            raise
        raise BadInput(FLAG, f"{where}: {error.message.rstrip('.')}") from None
    return found


def _unknown(path: Path, key: str, known: Any, problem: str) -> BadInput:
    near = difflib.get_close_matches(key.rpartition(".")[2].replace("-", "_"), list(known), 1)
    return BadInput(FLAG, f"{path}: {key}: {problem}" + (f"; did you mean {near[0]}?" if near else ""))
