"""Where a row's text is in its grammar, and which tokens may come next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from headway.sampling.rows import WORD, RowFailure, only


class GrammarState:
    """One row's place in a compiled grammar.

    Args:
        matcher: at the start of the grammar; this row's own.
        vocab: how many tokens its tokenizer has.
    """

    __slots__ = ("_matcher", "_problem", "_ready", "_words")

    def __init__(self, matcher: LLMatcher, vocab: int) -> None:
        self._matcher = matcher
        self._words = -(-vocab // WORD)
        self._problem = ""
        self._ready: np.ndarray | None = None  # the next mask

    def take(self, token: int) -> None:
        """A token became part of the row."""
        self._ready = None
        if not self._matcher.consume_token(token) and not self._problem:
            self._problem = self._matcher.get_error().partition("\n")[0]

    def fitting(self, tokens: Sequence[int]) -> int:
        """How many of these ids may come next, one after another. Changes nothing."""
        return 0 if self._problem else self._matcher.validate_tokens(list(tokens))

    def compute(self) -> np.ndarray:
        """The next mask, or nothing where the grammar is lost; worked out once, in any thread, and without Python's
        lock."""
        if self._ready is None:
            words = np.zeros(self._words, np.uint32)
            if not self._problem:
                self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
                if self._matcher.is_error():
                    self._problem = self._matcher.get_error().partition("\n")[0]
            self._ready = words
        return self._ready

    def mask(self, held: np.ndarray | None = None) -> np.ndarray:
        """The tokens that may come next, a bit each -> uint32 [ceil(vocab / WORD)], the lowest bit first.

        Args:
            held: ids that may not, unless nothing else may.

        Raises:
            RowFailure: a token of the row is not in the grammar, or llguidance gave up.
        """
        words = self.compute()
        if self._problem:
            raise RowFailure(f"the grammar cannot be followed any further: {self._problem}")
        if held is not None and len(held):
            rest = words & ~only(held, self._words * WORD)
            if rest.any():
                return rest
        return words


def allowed(masks: np.ndarray, vocab: int) -> np.ndarray:
    """Masks [rows, words] as bool [rows, vocab]; what they do not name is not allowed."""
    return np.unpackbits(masks.view(np.uint8), axis=1, count=vocab, bitorder="little").view(bool)
