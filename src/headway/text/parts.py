"""What an answer is made of: something said, something thought, calls of tools. Formats of model families are read
into these parts, and every API writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Said(msgspec.Struct, frozen=True, gc=False):
    """More of the text that the user reads."""

    text: str


class Thought(msgspec.Struct, frozen=True, gc=False):
    """More of the model's reasoning."""

    text: str


class CallBegun(msgspec.Struct, frozen=True, gc=False):
    """A call of the tool `name` begins. `id`: what the model calls it; "" = it does not say."""

    name: str
    id: str = ""


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of the JSON text of the arguments of the call that began last."""

    text: str


Part = Said | Thought | CallBegun | CallArguments


class PartParser(Protocol):
    """Reads the text of one choice as it comes. What it gives does not depend on where the text is cut.

    Attributes:
        thinking: what comes now belongs to the model's reasoning.
    """

    @property
    def thinking(self) -> bool: ...

    def push(self, text: str) -> Sequence[Part]:
        """The parts that became certain with this text."""
        ...

    def flush(self) -> Sequence[Part]:
        """Call once, at the end: whatever was held back."""
        ...
