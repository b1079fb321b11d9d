"""Options that a user may set. Each is declared once, as a field: the command line, Python and the docs follow.

class DoorOptions(Options, frozen=True, kw_only=True):
    wide: Annotated[int, Option("How wide, in cm.", least=60)] = 80
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Self, get_args, get_origin, get_type_hints

import msgspec

from headway.core.errors import BadInput, shown, unknown_name

_KINDS = {bool: "true or false", str: "a text", int: "an integer", float: "a number", tuple: "texts", Path: "a path"}


@dataclass(frozen=True)
class Option:
    """What an option means and accepts.

    Attributes:
        help: in a sentence or two.
        choices: the values it may have; empty = any, between the bounds.
        panel: what it is shown among in a verb's help; "" = the others of its set.
        least, above, most: bounds of a number: from `least` up, or above `above`, up to `most`; None = none.
        name, kind, optional, default: as the field has them; `optional`: it may be None. A kind of `tuple` is any
            number of texts.
    """

    help: str
    choices: tuple[Any, ...] = ()
    panel: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    name: str = ""
    kind: type = str
    optional: bool = False
    default: Any = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def accepted(self) -> str:
        """In words."""
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        if self.least is not None and self.most is not None:
            return f"{_KINDS[self.kind]} from {self.least:g} to {self.most:g}"
        bound = f" >= {self.least:g}" if self.least is not None else ""
        bound += f" above {self.above:g}" if self.above is not None else ""
        bound += f" and up to {self.most:g}" if self.most is not None else ""
        return _KINDS[self.kind] + bound

    @property
    def annotation(self) -> Any:
        """Its type on the command line, None included where it is optional."""
        if self.kind is tuple:
            return list[str] | None
        return self.kind | None if self.optional else self.kind

    def check(self, value: Any) -> None:
        """
        Raises:
            BadInput: the option does not accept it.
        """
        if value is None and self.optional:
            return
        fits = isinstance(value, (int, float) if self.kind is float else self.kind)
        fits = fits and (self.kind is bool or not isinstance(value, bool))
        if not fits or not self._holds(value):
            raise BadInput(self.flag, f"{shown(value)} is not {self.accepted}")

    def _holds(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if self.kind is tuple:
            return all(isinstance(one, str) for one in value)
        if self.least is self.above is self.most is None:
            return True
        least = -math.inf if self.least is None else self.least
        above = -math.inf if self.above is None else self.above
        return least <= value and above < value < math.inf and (self.most is None or value <= self.most)


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A set of options: a struct whose every field is `Annotated[kind, Option(...)] = default`.

    Raises:
        BadInput: a value is not one that its option accepts.
    """

    def __post_init__(self) -> None:
        for name, option in declared(type(self)).items():
            option.check(getattr(self, name))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """From keywords that a user gave.

        Raises:
            BadInput: one is unknown, or its value is not accepted.
        """
        known = declared(cls)
        for name in values.keys() - known.keys():
            raise unknown_name(name, known, f"an option of {cls.about()}")
        return cls(**values)

    def words(self) -> list[str]:
        """The command line that says what is not at its default."""
        found: list[str] = []
        for name, option in declared(type(self)).items():
            value = getattr(self, name)
            if value == option.default:
                continue
            if option.kind is bool:
                found.append(option.flag if value else "--no-" + option.flag.removeprefix("--"))
            else:
                for one in value if option.kind is tuple else (value,):
                    found += [option.flag, str(one)]
        return found

    @classmethod
    def about(cls) -> str:
        """What is set up, in words."""
        return f"the {cls.__name__.removesuffix('Options').lower()}"


@cache
def declared(kind: type[Options]) -> dict[str, Option]:
    """By name, in the order of their declaration."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: _option(field, *get_args(hints[field.name])) for field in msgspec.structs.fields(kind)}


def _option(field: msgspec.structs.FieldInfo, hint: Any, declared: Option) -> Option:
    kinds = (tuple,) if get_origin(hint) is tuple else get_args(hint) or (hint,)
    return replace(declared, name=field.name, kind=kinds[0], optional=type(None) in kinds, default=field.default)


def table(kind: type[Options], python: str = "") -> str:
    """A set in Markdown, for the docs.

    Args:
        python: how Python's users write it, for a column of names; "" = they do not.
    """
    lines = ["| command line | default | accepts | |", "|---|---|---|---|"]
    for option in declared(kind).values():
        default = f"`{option.default}`" if option.default not in (None, ()) else ""
        flag = "`MODEL`" if option.name == "model" else f"`{option.flag}`"
        lines.append(f"| {flag} | {default} | {option.accepted} | {option.help} |")
    if python:
        first = [f"| `{python}` ", "|---", *(f"| `{name}` " for name in declared(kind))]
        lines = [name + line for name, line in zip(first, lines, strict=True)]
    return "\n".join(lines)
