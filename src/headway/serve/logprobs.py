"""Log-probabilities of tokens, as answers show them."""

from __future__ import annotations

import codecs
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from headway.core.errors import BadInput
from headway.core.step import TokenLogprobs

if TYPE_CHECKING:
    from headway.serve.text import Text

_LONGEST_CHARACTER = 4  # bytes of UTF-8
MAX_ALTERNATIVES = 20  # per token
LOWEST = -9999.0  # stands for minus infinity, which JSON cannot hold


def alternatives_of(field: str, count: int) -> int:
    """How many likeliest alternatives per token a client asks for in `field`.

    Raises:
        BadInput: more than any API gives.
    """
    if not 0 <= count <= MAX_ALTERNATIVES:
        raise BadInput(field, f"{count} is not an integer from 0 to {MAX_ALTERNATIVES}")
    return count


def asked(wanted: bool | None, top: int | None) -> int | None:
    """Of `logprobs` and `top_logprobs`: how many alternatives per token; None = no log-probabilities at all.

    Raises:
        BadInput: there are alternatives of nothing, or too many.
    """
    if top and not wanted:
        raise BadInput("top_logprobs", "only allowed with logprobs=true")
    return alternatives_of("top_logprobs", top or 0) if wanted else None


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


class ShownToken(msgspec.Struct, frozen=True, gc=False):
    """A token of an answer, with what of its text the answer shows.

    Attributes:
        data: bytes of that text; perhaps a piece of a character.
    """

    data: bytes
    position: TokenLogprobs


class _Pending(NamedTuple):
    """A token, and which characters of the text are its own: those from `start` to `end`; it needs `needs` of them to
    be shown before it is."""

    token: ShownToken
    start: int
    needs: int
    text: str


class ShownTokens:
    """Which tokens stand for the text that a choice has shown so far: their bytes join to it.

    A token whose text is held back waits for it; one without text (it ended the answer, or controls something) is left
    out, and so are those of a stop string; of one that a stop string begins in, the part before it stays.

    Args:
        prompt: what the text continues: it may end within a character.
        skip_special: control tokens have no text.
        keep_end: the last token is there even without text: clients that score an echo take the last entry for what
            was generated.
    """

    def __init__(self, text: Text, prompt: Sequence[int], skip_special: bool, keep_end: bool = False) -> None:
        self._text = text
        self._skip = skip_special
        self._keep_end = keep_end
        self._strip = text.strip_after(prompt)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(b"".join([text.token_bytes(id, skip_special) for id in prompt[-_LONGEST_CHARACTER:]]))
        self._pending: deque[_Pending] = deque()
        self._shown = 0  # characters
        self._end = 0  # of the tokens'

    def push(self, shown: str, logprobs: Sequence[TokenLogprobs], last: bool) -> list[ShownToken]:
        """The tokens whose text `shown` completes; `last`: no more will come."""
        self._shown += len(shown)
        for position in logprobs:
            self._add(position)
        found = []
        while self._pending and self._pending[0].needs <= self._shown:
            found.append(self._pending.popleft().token)
        if last and self._pending and self._pending[0].start < self._shown:
            cut = self._pending[0]
            kept = cut.text[: self._shown - cut.start].encode()
            found.append(ShownToken(kept, cut.token.position))
        if last and self._keep_end and logprobs and not any(token.position is logprobs[-1] for token in found):
            found.append(ShownToken(b"", logprobs[-1]))
        return found

    def _add(self, position: TokenLogprobs) -> None:
        data = self._text.token_bytes(position.token, self._skip)
        if not data:
            return
        decoded = self._decoder.decode(data)
        text = decoded
        if self._strip and decoded:
            text = decoded[min(self._strip, len(decoded) - len(decoded.lstrip(" "))) :]
            self._strip = 0 if text else self._strip - len(decoded)
            if len(text) < len(decoded):
                data = data[len(decoded) - len(text) :]
        start, self._end = self._end, self._end + len(text)
        unfinished = bool(self._decoder.getstate()[0])
        self._pending.append(_Pending(ShownToken(data, position), start, self._end + unfinished, text))


def named_tokens(text: Text, logprobs: Iterable[TokenLogprobs]) -> list[ShownToken]:
    """Tokens with all they stand for: control tokens with their names."""
    return [ShownToken(text.token_bytes(position.token), position) for position in logprobs]


def _entry(data: bytes, logprob: float) -> dict[str, Any]:
    name = readable(data)
    return {"token": escaped(data) if name is None else name, "logprob": finite(logprob), "bytes": list(data)}


def entries(text: Text, tokens: Iterable[ShownToken], count: int) -> list[dict[str, Any]]:
    """One entry per token, with its exact bytes and the `count` likeliest alternatives."""
    found = []
    for token in tokens:
        entry = _entry(token.data, token.position.logprob)
        entry["top_logprobs"] = [_entry(text.token_bytes(id), logprob) for id, logprob in token.position.top[:count]]
        found.append(entry)
    return found
