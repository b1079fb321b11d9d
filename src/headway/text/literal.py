"""Encoding in which the names of control tokens are only text, except where the caller says otherwise."""

from __future__ import annotations

import re
import secrets
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from functools import cached_property
from itertools import groupby

import tokenizers
from tokenizers import AddedToken

from headway.core.errors import BadInput, ModelFileError

_GUARD_FIRST, _GUARD_LAST = 0x100000, 0x10FFFD  # private characters, which no normaliser touches
_GUARD_LENGTH = 8
_SHORT = 4096  # characters: encoded in less time than it takes to change threads


def of_library(error: BaseException) -> bool:
    """Whether the library says so that a tokenizer is broken: by a plain Exception, or by a panic, which is none."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def encoded(tokenizer: tokenizers.Tokenizer, text: str, aside: Executor | None = None) -> list[int]:
    """Token ids of a text, and nothing around them.

    Args:
        aside: where to do the long part, which needs no Python; None = in this thread.

    Raises:
        BadInput: it is not Unicode.
        ModelFileError: the tokenizer is broken in a way that only this text shows.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInput("prompt", "holds half of a surrogate pair; it must be text that UTF-8 can write") from None

    def encode() -> list[tokenizers.Encoding]:
        # The batch call, unlike `encode`, lets other Python threads run meanwhile; "fast" leaves out offsets.
        return tokenizer.encode_batch_fast([text], add_special_tokens=False)

    try:
        done = encode() if aside is None or len(text) < _SHORT else aside.submit(encode).result()
    except BaseException as error:
        if not of_library(error):
            raise
        raise ModelFileError("the model's tokenizer is broken: it fails on this text") from None
    return done[0].ids


class Encoder:
    """Text to ids by a tokenizer of the library. May be used from several threads.

    Args:
        tokenizer: it; an attribute too.
        aside: where to do the long part, which needs no Python; None = in the caller's thread.
        ids: of the checkpoint, by those of `tokenizer`; None = they are the same.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, aside: Executor | None = None, ids: Sequence[int] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._aside = aside
        self._ids = ids

    def encode(self, text: str) -> list[int]:
        """Names of control tokens in it are such."""
        return self._given(encoded(self.tokenizer, text, self._aside))

    def encode_around(self, text: str, plain: Mapping[str, str]) -> list[int]:
        """As `LiteralTokenizer.encode`."""
        return self._given(self.literal.encode(text, plain))

    def encode_literal(self, text: str) -> list[int]:
        """Names of control tokens in it are text."""
        return self._given(encoded(self.literal.tokenizer, text, self._aside))

    @cached_property
    def literal(self) -> LiteralTokenizer:
        return LiteralTokenizer(self.tokenizer, self._aside)

    def _given(self, ids: list[int]) -> list[int]:
        return ids if self._ids is None else [self._ids[id] for id in ids]


class LiteralTokenizer:
    """A second tokenizer, since whether control tokens are recognised is a state of the library's object.

    Each control token has a stand-in here: a secret word with the same rules of matching, which the library cuts out
    of a text exactly as it cuts out the token. So one call encodes a text with both real and merely named control
    tokens, and what lies between real ones is encoded as it always is.

    Attributes:
        tokenizer: reads names of control tokens as text.
    """

    def __init__(self, original: tokenizers.Tokenizer, aside: Executor | None = None) -> None:
        self._aside = aside
        self.tokenizer = _twin(original)
        self.tokenizer.encode_special_tokens = True
        added = original.get_added_tokens_decoder()
        control = {id: token for id, token in added.items() if token.special}
        names = [token.content for token in added.values()]
        self._guards = dict(zip(names, _guards(len(names)), strict=True))
        self.tokenizer.add_tokens([_stand_in(token, self._guards[token.content]) for token in control.values()])
        self._real = {self.tokenizer.token_to_id(self._guards[token.content]): id for id, token in control.items()}
        # As the library matches: tokens that are not normalised before the others, and the longest first.
        self._order = sorted(added.values(), key=lambda token: (token.normalized, -len(token.content)))

    def encode(self, text: str, plain: Mapping[str, str]) -> list[int]:
        """Token ids of a text in which control tokens are such, while a character in `plain` is the text it maps to.

        Raises:
            BadInput: the text is not Unicode.
        """
        shielded = []  # known words that are no control tokens, but may hold the name of one
        for token in self._order:  # no pattern over all names: a text of many "<" would take it for ever
            if token.content in text:
                text = _replaced(text, token, self._guards[token.content])
                if not token.special:
                    shielded.append(token.content)
        for name in shielded:
            text = text.replace(self._guards[name], name)
        for character, words in plain.items():
            text = text.replace(character, words)
        return [self._real.get(id, id) for id in encoded(self.tokenizer, text, self._aside)]


def _twin(original: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer that does the same, of the same vocabulary and merges: to copy those takes seconds."""
    twin = tokenizers.Tokenizer(original.model)
    twin.normalizer, twin.pre_tokenizer = original.normalizer, original.pre_tokenizer
    added = original.get_added_tokens_decoder()
    for special, tokens in groupby((added[id] for id in sorted(added)), lambda token: token.special):
        (twin.add_special_tokens if special else twin.add_tokens)(list(tokens))  # which gives them ids anew, in order
    if twin.get_added_tokens_decoder() == added:
        return twin
    return tokenizers.Tokenizer.from_str(original.to_str())  # it has gaps among its ids


def _guards(count: int) -> list[str]:
    """Words that nobody can guess."""
    letters = range(_GUARD_FIRST, _GUARD_LAST + 1)
    random = struct.iter_unpack(f"{_GUARD_LENGTH}I", secrets.token_bytes(4 * _GUARD_LENGTH * count))
    return ["".join(chr(letters[number % len(letters)]) for number in word) for word in random]


def _stand_in(token: AddedToken, guard: str) -> AddedToken:
    return AddedToken(
        guard,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )


def _replaced(text: str, token: AddedToken, by: str) -> str:
    if token.single_word:
        return re.sub(rf"(?<!\w){re.escape(token.content)}(?!\w)", by, text)
    return text.replace(token.content, by)
