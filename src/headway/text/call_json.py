"""Calls of tools written as JSON, read character by character: their arguments are given out as they come."""

from __future__ import annotations

import json
from collections.abc import Collection

from headway.text.parts import CallArguments, CallBegun, Part, Said

NAMES = ("name", "function")
ARGUMENTS = ("arguments", "parameters")


class Balanced:
    """Follows one JSON object or list to its last bracket.

    Attributes:
        depth: open brackets.
        in_string: within a string.
    """

    __slots__ = ("_escaped", "depth", "in_string")

    def __init__(self) -> None:
        self.depth = 0
        self.in_string = False
        self._escaped = False

    def follow(self, character: str) -> bool:
        """Whether the value ends with this character."""
        if self.in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self.in_string = False
        elif character == '"':
            self.in_string = True
        elif character in "{[":
            self.depth += 1
        elif character in "}]":
            self.depth -= 1
            return self.depth == 0
        return False


class RawArguments:
    """A JSON object that is the arguments of a call whose name is known. What stands before it is dropped.

    Args:
        name, id: of the call.
    """

    def __init__(self, name: str, id: str = "") -> None:
        self._begun = CallBegun(name, id)
        self._balanced = Balanced()
        self.done = False

    def push(self, text: str) -> tuple[list[Part], str]:
        """The parts of `text`, and what of it comes after the object."""
        parts: list[Part] = []
        if not self._balanced.depth:
            start = text.find("{")
            if start < 0:
                return parts, ""
            text = text[start:]
            parts.append(self._begun)
        for at, character in enumerate(text):
            if self._balanced.follow(character):
                self.done = True
                return [*parts, CallArguments(text[: at + 1])], text[at + 1 :]
        return [*parts, CallArguments(text)], ""

    def flush(self) -> list[Part]:
        return []


class CallObject:
    """One call as a JSON object with its name and its arguments, in any order and among other fields. Push text that
    starts with its "{" .

    What is no call (it has no name, or one that is not among `known`) is said.

    Args:
        known: names of tools; None = any will do.
    """

    def __init__(self, known: Collection[str] | None = None) -> None:
        self._known = known
        self._balanced = Balanced()
        self._raw: list[str] = []  # all of it, while it may turn out to be no call
        self._value: list[str] = []  # of the field being read, from its first character
        self._key: str | None = None
        self._fields: dict[str, str] = {}  # JSON text of each field that is needed
        self._begun = False
        self.done = False

    def push(self, text: str) -> tuple[list[Part], str]:
        """The parts of `text`, and what of it comes after the object."""
        parts: list[Part] = []
        out: list[str] = []  # of the arguments
        end = 0  # of what was read
        for character in text:
            end += 1
            level, quoted = self._balanced.depth, self._balanced.in_string
            self.done = self._balanced.follow(character)
            if not self._begun:
                self._raw.append(character)
            if level == 1 and not quoted and character in ",:}":
                self._end_part(character)
            elif level and (self._value or not character.isspace()):
                self._value.append(character)
                within = level > 1 or self._balanced.depth > 1  # not the blanks behind the last bracket
                if within and self._streams and (self._begun or (len(self._value) == 1 and self._begin(parts))):
                    out.append(character)
            if self.done:
                break
        if out:
            parts.append(CallArguments("".join(out)))
        return ([*parts, *self._end()], text[end:]) if self.done else (parts, "")

    @property
    def _streams(self) -> bool:
        """What is being read are the arguments, and an object."""
        return self._key in ARGUMENTS and self._value[0] == "{" and self._fields.keys().isdisjoint(ARGUMENTS)

    def flush(self) -> list[Part]:
        """The text ended within the object."""
        return [] if self._begun else [Said("".join(self._raw))]

    def _end_part(self, mark: str) -> None:
        """A field's name ends, or its value."""
        value, self._value = "".join(self._value).strip(), []
        if mark == ":":
            self._key = _text(value)
        else:
            if self._key is not None:
                self._fields.setdefault(self._key, value)
            self._key = None

    def _begin(self, parts: list[Part]) -> bool:
        """Say that the call begins, if its name is known by now."""
        name = next((name for field in NAMES if (name := _text(self._fields.get(field, "")))), None)
        if not name or (self._known is not None and name not in self._known):
            return False
        parts.append(CallBegun(name, _text(self._fields.get("id", "")) or ""))
        self._begun = True
        return True

    def _end(self) -> list[Part]:
        """What is left to say of it: nothing, if its arguments were given out as they came."""
        if self._begun:
            return []
        parts: list[Part] = []
        if not self._begin(parts):
            return [Said("".join(self._raw))]
        given = next((self._fields[field] for field in ARGUMENTS if field in self._fields), "{}")
        return [*parts, CallArguments(_text(given) or (given if given != "null" else "{}"))]


def _text(value: str) -> str | None:
    """The string that a JSON text is; None = it is none."""
    try:
        text = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return text if isinstance(text, str) else None
