"""What the header of a GGUF file says about its tokenizer, checked field by field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
from tokenizers import AddedToken

from headway.core.errors import ModelFileError, shown
from headway.text.source import TokenizerSource

# tokenizer.ggml.token_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


class Header:
    """The `tokenizer.ggml.*` keys of a file; every fault names file and key."""

    def __init__(self, source: TokenizerSource) -> None:
        self._source = source

    @cached_property
    def tokens(self) -> list[str]:
        """Their texts by id, each once."""
        tokens = self.strings("tokens")
        if len(set(tokens)) != len(tokens):
            raise self.fault("tokenizer.ggml.tokens names a token twice")
        return tokens

    @cached_property
    def types(self) -> list[int]:
        """By id: one of the constants above, or a number that stands for none."""
        types = self.get("token_type", list)
        if len(types) != len(self.tokens):
            raise self.fault(f"tokenizer.ggml.token_type has {len(types)} entries for {len(self.tokens)} tokens")
        return types

    @cached_property
    def marked(self) -> list[tuple[int, str, int]]:
        """(id, text, type) of tokens that are not normal: a few of hundreds of thousands."""
        typed = enumerate(zip(self.tokens, self.types, strict=True))
        return [(id, token, kind) for id, (token, kind) in typed if kind != NORMAL]

    def of_type(self, *kinds: int) -> list[str]:
        """The tokens of some types, none of them normal."""
        return [token for _, token, kind in self.marked if kind in kinds]

    def added(self, written: Callable[[int], str], special: tuple[int, ...]) -> dict[int, AddedToken]:
        """What is found in a text before anything else, by id: control tokens, of the types `special`, and words that
        are never split. written: how the vocabulary has a token."""
        found = [(id, kind in special) for id, _, kind in self.marked if kind in (*special, USER_DEFINED)]
        tokens = {id: AddedToken(written(id), special=control, normalized=False) for id, control in found}
        return {id: token for id, token in tokens.items() if token.content}

    def strings(self, key: str) -> list[str]:
        values = self.get(key, list)
        if set(map(type, values)) - {str}:
            raise self.fault(f"tokenizer.ggml.{key} is not a list of strings")
        return values

    def get(self, key: str, kind: type) -> Any:
        value = self._source.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, kind):
            raise self.fault(f"tokenizer.ggml.{key} is missing or not a {kind.__name__}")
        return value

    def optional(self, key: str, kind: type, default: Any) -> Any:
        has = self._source.metadata.get(f"tokenizer.ggml.{key}") is not None
        return self.get(key, kind) if has else default

    def token_id(self, kind: str) -> int | None:
        """`tokenizer.ggml.KIND_token_id`."""
        key = f"tokenizer.ggml.{kind}_token_id"
        id = self._source.metadata.get(key)
        if id is not None and (type(id) is not int or not 0 <= id < 2**32):
            raise self.fault(f"{key}: {shown(id)} is not a token id")
        return id

    def cut(self, ids: Sequence[int], keys: Mapping[str, Any]) -> Header:
        """The header of these tokens alone, numbered anew in this order; keys: what it says otherwise."""
        tokens, types = self.tokens, self.types
        small = {"tokens": [tokens[id] for id in ids], "token_type": [types[id] for id in ids], **keys}
        metadata = {**self._source.metadata, **{f"tokenizer.ggml.{key}": value for key, value in small.items()}}
        return Header(msgspec.structs.replace(self._source, metadata=metadata))

    def fault(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self._source.path}: {problem}")
