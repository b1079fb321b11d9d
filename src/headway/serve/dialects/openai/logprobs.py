"""Log-probabilities in OpenAI's two shapes: `content` entries for chat, four parallel lists for completions."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence
from typing import Any

from headway.core.step import TokenLogprobs
from headway.serve.text import Text

LOWEST = -9999.0  # stands for minus infinity, which JSON cannot hold


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


def readable(data: bytes) -> str | None:
    """The token's text; None if it is a piece of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def escaped(data: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in data)


def chat_entry(text: Text, token: int, logprob: float) -> dict[str, Any]:
    data = text.token_bytes(token)
    name = readable(data)
    return {"token": escaped(data) if name is None else name, "logprob": finite(logprob), "bytes": list(data)}


def chat_entries(text: Text, logprobs: Iterable[TokenLogprobs], count: int) -> list[dict[str, Any]]:
    """Entries of `choices[].logprobs.content`, with the `count` likeliest alternatives each."""
    entries = []
    for position in logprobs:
        entry = chat_entry(text, position.token, position.logprob)
        entry["top_logprobs"] = [chat_entry(text, token, logprob) for token, logprob in position.top[:count]]
        entries.append(entry)
    return entries


class CompletionLogprobs:
    """The `logprobs` of one completion choice, piece by piece; offsets count characters of the whole text.

    A token that is only a piece of a character is called `bytes:\\xf0\\x9f`; its offset is where the character will be.
    """

    def __init__(self, text: Text, count: int) -> None:
        self._text = text
        self._count = count
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def first(self, token: int, hidden: bool) -> dict[str, Any]:
        """The prompt's first token, which nothing predicts; `hidden`: it is not part of the text."""
        lists = self._lists([(token, None, None)])
        if hidden:
            self._offset = 0
        return lists

    def piece(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return self._lists([(position.token, position.logprob, position) for position in logprobs])

    def _lists(self, positions: list[tuple[int, float | None, TokenLogprobs | None]]) -> dict[str, Any]:
        lists: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, logprob, position in positions:
            data = self._text.token_bytes(token)
            if data and data[0] & 0xC0 != 0x80:  # not the rest of a character: an unfinished one before it is U+FFFD
                self._offset += len(self._decoder.decode(b"", final=True))
            lists["tokens"].append(_name(data))
            lists["token_logprobs"].append(None if logprob is None else finite(logprob))
            lists["top_logprobs"].append(None if position is None else self._top(position))
            lists["text_offset"].append(self._offset)
            self._offset += len(self._decoder.decode(data))
        return lists

    def _top(self, position: TokenLogprobs) -> dict[str, float]:
        """The sampled token first, then the likeliest ones; of two tokens with one name the likelier stays."""
        top = {_name(self._text.token_bytes(position.token)): finite(position.logprob)}
        for token, logprob in position.top[: self._count]:
            top.setdefault(_name(self._text.token_bytes(token)), finite(logprob))
        return top


def _name(data: bytes) -> str:
    name = readable(data)
    return "bytes:" + escaped(data) if name is None else name


def joined(pieces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pieces of `CompletionLogprobs`, as one."""
    return {name: [item for piece in pieces for item in piece[name]] for name in pieces[0]} if pieces else {}
