"""Typed reading of a config: a field of the wrong type or out of range is one clear sentence, never a surprise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from headway.core.errors import HeadwayError, shown

MAX_SIZE = (1 << 32) - 1  # no dimension of a model is near it; products of four stay exact in Python
MAX_CONTEXT = 1 << 24  # positions; the longest that any model states are 10 million
MAX_HEADS = 4096  # per layer; activations of a step grow with them, whatever the file weighs
MAX_LAYERS = 4096  # far more than any model has; readers make a list of them


class Recalled(dict[str, Any]):
    """Values that remember which of them were asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        return super().get(name, default)


class Fields:
    """Values of a config by name, checked as they are read.

    Args:
        values: config.json's object, or GGUF metadata.
        where: what they come from; starts every error.
        error: makes the error of (field, problem): `ModelFileError.of`, `BadInput`.
        names: what errors call a field, where that is not its name here.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        error: Callable[[str, str], HeadwayError],
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.values = values
        self.where = where
        self.error = error
        self.names = names or {}

    def holding(self, values: Mapping[str, Any]) -> Fields:
        """Other values, from the same place."""
        return Fields(values, self.where, self.error, self.names)

    def watched(self) -> Fields:
        """The same, remembering in `values.seen` which of them are read."""
        return self.holding(Recalled(self.values))

    def fault(self, name: str, problem: str) -> HeadwayError:
        return self.error(f"{self.where}: {self.names.get(name, name)}", problem)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def size(self, *names: str, default: int | None = None, most: int = MAX_SIZE) -> int:
        """An integer from 1 to `most`, under the first of `names` that is there; `default` if none is, required
        without one."""
        name = next(filter(self.has, names), names[0])
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
            raise self.fault(name, f"{shown(value)} is not an integer from 1 to {most}")
        return value

    def maybe(self, *names: str) -> int | None:
        """As `size`; None if none of `names` is there (or is 0, which configs write for "none")."""
        names = tuple(name for name in names if self.values.get(name))
        return self.size(*names) if names else None

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._get(name, default)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value <= sys.float_info.max:
            raise self.fault(name, f"{shown(value)} is not a positive number")
        return float(value)

    def numbers(self, name: str, count: int) -> list[float]:
        """A list of `count` positive finite numbers."""
        value = self._get(name, None)
        if not isinstance(value, list) or len(value) != count:
            raise self.fault(name, f"{shown(value)} is not a list of {count} numbers")
        one = Fields({f"{name}[{index}]": number for index, number in enumerate(value)}, self.where, self.error)
        return [one.number(index) for index in one.values]

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.fault(name, f"{shown(value)} is neither true nor false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.fault(name, f"{shown(value)} is not a string")
        return value

    def group(self, name: str) -> Fields:
        """A nested object; empty if missing or null."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.fault(name, f"{shown(value)} is not an object")
        return Fields(value, f"{self.where}: {name}", self.error)

    def words(self, name: str, count: int) -> list[str] | None:
        """A list of `count` strings (one per layer); None if missing or null."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != count or not all(isinstance(word, str) for word in value):
            raise self.fault(name, f"{shown(value)} is not a list of {count} strings")
        return value

    def token_id(self, name: str, vocab_size: int) -> int | None:
        """A token id below vocab_size, or None if there is none."""
        ids = self.token_ids(name, vocab_size)
        if len(ids) > 1:
            raise self.fault(name, f"{shown(ids)} is not one token id")
        return ids[0] if ids else None

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One id or a list of ids, each below vocab_size; () if missing or null."""
        value = self.values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise self.fault(name, f"{shown(token)} is not a token id from 0 to {vocab_size - 1}")
        return tuple(ids)

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise self.fault(name, "is missing")
            return default
        return value
