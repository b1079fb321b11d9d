"""Log-probabilities of OpenAI's completions: four parallel lists."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from headway.serve.logprobs import ShownToken, escaped, finite, readable
from headway.serve.text import Text


class CompletionLogprobs:
    """The `logprobs` of one completion choice, piece by piece; offsets count characters of the whole text.

    A token that is only a piece of a character is called `bytes:\\xf0\\x9f`; its offset is where the character will be.

    Args:
        count: alternatives per token.
        strip: spaces at the start that are not part of the text.
    """

    def __init__(self, text: Text, count: int, strip: int) -> None:
        self._text = text
        self._count = count
        self._strip = strip
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def fork(self, strip: int) -> CompletionLogprobs:
        """Another that goes on from here, where `strip` spaces are not part of the text."""
        other = CompletionLogprobs(self._text, self._count, strip)
        other._offset = self._offset
        other._decoder.setstate(self._decoder.getstate())
        return other

    def first(self, token: int, hidden: bool) -> dict[str, Any]:
        """The prompt's first token, which nothing predicts; `hidden`: it is not part of the text."""
        strip = self._strip
        lists = self._lists([(self._text.token_bytes(token), None)])
        if hidden:
            self._offset, self._strip = 0, strip
        return lists

    def piece(self, tokens: Sequence[ShownToken]) -> dict[str, Any]:
        return self._lists([(token.data, token) for token in tokens])

    def _lists(self, tokens: list[tuple[bytes, ShownToken | None]]) -> dict[str, Any]:
        lists: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for data, token in tokens:
            if data and data[0] & 0xC0 != 0x80:  # not the rest of a character: an unfinished one before it is U+FFFD
                self._advance(self._decoder.decode(b"", final=True))
            lists["tokens"].append(_name(data))
            lists["token_logprobs"].append(None if token is None else finite(token.position.logprob))
            lists["top_logprobs"].append(None if token is None else self._top(token))
            lists["text_offset"].append(self._offset)
            self._advance(self._decoder.decode(data))
        return lists

    def _advance(self, text: str) -> None:
        cut = min(self._strip, len(text) - len(text.lstrip(" ")))
        self._strip = 0 if len(text) > cut else self._strip - cut
        self._offset += len(text) - cut

    def _top(self, token: ShownToken) -> dict[str, float]:
        """The sampled token first, then the likeliest ones; of two tokens with one name the likelier stays."""
        top = {_name(token.data): finite(token.position.logprob)}
        for id, logprob in token.position.top[: self._count]:
            if id != token.position.token:  # it may be shown in part
                top.setdefault(_name(self._text.token_bytes(id)), finite(logprob))
        return top


def _name(data: bytes) -> str:
    name = readable(data)
    return "bytes:" + escaped(data) if name is None else name


def joined(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pieces of `CompletionLogprobs`, as one."""
    return {name: [item for piece in pieces for item in piece[name]] for name in pieces[0]} if pieces else {}
