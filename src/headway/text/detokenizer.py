"""Token ids to text as they come, never with half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from contextlib import suppress

from headway.text.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4  # bytes of UTF-8


class Detokenizer:
    """Incremental decoding of what follows a prompt.

    The pieces that `push` and the final `flush` return, put together, are the text of the pushed ids. An incomplete
    character is held until its last byte comes; only `flush` turns it into U+FFFD. Each push costs the length of
    one token.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, skip_special: bool = True) -> None:
        """Continue after `prompt`, whose text is not repeated.

        If the prompt ends within a character, the character is completed by what follows and returned whole.
        """
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._whole = tokenizer.whole_texts(skip_special)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = tokenizer.strip_after(prompt)
        self._decoder.decode(self._last_bytes(prompt))
        self._between = self._is_between()

    def push(self, token: int) -> str:
        """The text that became certain with this token; often one word, sometimes nothing."""
        if self._between and token in self._whole:
            return self._whole[token]
        known = self._tokenizer.token_bytes(token, skip_special=self._skip_special)
        text = self._cut(self._decoder.decode(known))
        if self._between:
            with suppress(UnicodeDecodeError):
                self._whole[token] = known.decode()
        self._between = self._is_between()
        return text

    def _is_between(self) -> bool:
        """No character is incomplete, and nothing is to be stripped: what comes is decoded on its own."""
        return not self._strip and not self._decoder.getstate()[0]

    def flush(self) -> str:
        """Call once, at the end: U+FFFD if the text ends within a character, else nothing."""
        return self._cut(self._decoder.decode(b"", final=True))

    def _last_bytes(self, prompt: Sequence[int]) -> bytes:
        """Enough of the prompt's end to hold any incomplete character."""
        tail = b""
        for token in reversed(prompt):
            tail = self._tokenizer.token_bytes(token, skip_special=self._skip_special) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        return tail

    def _cut(self, text: str) -> str:
        """Drop the space a SentencePiece-like tokenizer puts at the start of a text."""
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text
