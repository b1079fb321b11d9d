"""What a user may see of a row: its tokens as text, up to a stop string or a stop id."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headway.text.detokenizer import Detokenizer
from headway.text.stop import StopMatcher
from headway.text.tokenizer import Tokenizer


class OutputText:
    """The visible text of one generation. Push each generated id once, in order; then flush.

    The pieces put together are the text of the ids, cut before the first stop string. A stop id has no text. With
    `include_stop` the text ends with either; without `skip_special` control tokens have their names.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        *,
        stop: Sequence[str] = (),
        stop_ids: Collection[int] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt, skip_special=skip_special)
        self._stops = StopMatcher(stop, min_tokens, include_stop) if stop else None
        self._stop_ids = () if include_stop else stop_ids

    @property
    def matched(self) -> str | None:
        """The stop string that was met: push no more tokens."""
        return None if self._stops is None else self._stops.matched

    def push(self, token: int) -> str:
        """The text that became certain with this token."""
        text = "" if token in self._stop_ids else self._detokenizer.push(token)
        return self._stops.push(text) if self._stops is not None else text

    def flush(self) -> str:
        """Call once, when the generation has ended: whatever was held back."""
        if self.matched is not None:
            return ""
        ending = self._detokenizer.flush()
        return ending if self._stops is None else self._stops.push(ending) + self._stops.flush()
