"""What an answer may look like, as a user states it: a JSON schema, a regular expression, a choice, a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headway.core.errors import BadInput, shown

KINDS = ("json_schema", "regex", "choice", "grammar", "compiled")
MAX_GRAMMAR = 4 << 20  # characters of its source; of a regular expression, a choice or a grammar, a sixteenth
MAX_CHOICES = 16384
ANY_OBJECT = '{"type":"object"}'


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A language that the generated text must be in, from its first character to its last.

    Attributes:
        kind: "json_schema"; "regex" (of Rust's regex crate: no look-around, anchored at both ends); "choice" (a JSON
            list of texts); "grammar" (Lark's notation as llguidance extends it, or llama.cpp's GBNF); "compiled"
            (llguidance's own JSON, what `text.grammar` makes of all others).
        source: its text.

    Raises:
        BadInput: the kind is none of these, or the source is empty or too large.
    """

    kind: str
    source: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadInput("grammar", f"{shown(self.kind)} is not one of {', '.join(KINDS)}")
        most = MAX_GRAMMAR if self.kind in ("json_schema", "compiled") else MAX_GRAMMAR >> 4
        if not isinstance(self.source, str) or not 0 < len(self.source) <= most:
            raise BadInput("grammar", f"its source must be a text of 1 to {most} characters")

    def as_json(self) -> dict[str, Any]:
        """As vLLM's `structured_outputs` says it; of any kind but "compiled"."""
        name = {"json_schema": "json"}.get(self.kind, self.kind)
        return {name: json.loads(self.source) if self.kind in ("json_schema", "choice") else self.source}

    @classmethod
    def json_schema(cls, schema: str | bool | Mapping[str, Any]) -> Grammar:
        """JSON that is valid by a schema, given as such or as its text."""
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_schema", ANY_OBJECT)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that matches all of a regular expression."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of these texts.

        Raises:
            BadInput: there is none, or too many.
        """
        good = isinstance(texts, (list, tuple)) and all(isinstance(text, str) and text for text in texts)
        if not good or not 0 < len(texts) <= MAX_CHOICES:
            raise BadInput("choice", f"give a list of 1 to {MAX_CHOICES} texts, none of them empty")
        return cls("choice", json.dumps(list(texts), ensure_ascii=False))

    @classmethod
    def ebnf(cls, source: str) -> Grammar:
        """A text that a grammar in Lark's notation, or in llama.cpp's GBNF, derives."""
        return cls("grammar", source)
