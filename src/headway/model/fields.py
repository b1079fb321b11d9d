"""Typed reading of a config: a field of the wrong type or out of range is one clear sentence, never a surprise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from headway.core.errors import ModelFileError
from headway.model.gguf import shown

MAX_SIZE = 1 << 32  # no dimension of a model is near it; products of four stay exact in Python


class Fields:
    """Values of a config by name, checked as they are read.

    Args:
        values: config.json's object, or GGUF metadata.
        where: what they come from; starts every error.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where

    def fault(self, name: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.where}: {name}: {problem}")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def size(self, name: str, default: int | None = None) -> int:
        """A positive integer; `default` if the field is missing or null, required without one."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < MAX_SIZE:
            raise self.fault(name, f"{shown(value)} is not an integer from 1 to {MAX_SIZE - 1}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.fault(name, f"{shown(value)} is not a positive number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
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
        return Fields(value, f"{self.where}: {name}")

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
