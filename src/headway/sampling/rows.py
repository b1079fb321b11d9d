"""What the sampler keeps of a row between steps: its parameters, its noise key, and which tokens it has seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headway.core.errors import BadInput
from headway.core.request import MAX_BAD, SamplingParams
from headway.core.step import RowInit
from headway.sampling.thinking import ThinkingState

if TYPE_CHECKING:
    from headway.sampling.grammar import GrammarState


WORD = 32  # tokens per word of a mask: a tile of logits


class RowFailure(Exception):
    """Nothing can be drawn for one row; `str()` is the sentence for its user. Other rows are not affected."""


class TokenCounts:
    """How often each token occurred. Adding one is O(1); reading touches only the distinct ones."""

    __slots__ = ("_counts", "_ids", "_index")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        counted = Counter(tokens)
        self._index = {token: index for index, token in enumerate(counted)}
        self._ids = np.zeros(len(counted) + 16, np.int64)
        self._counts = np.zeros(len(counted) + 16, np.float32)
        self._ids[: len(counted)] = list(counted)
        self._counts[: len(counted)] = list(counted.values())

    def add(self, token: int) -> None:
        index = self._index.setdefault(token, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[index] = token
        self._counts[index] += 1

    @property
    def ids(self) -> np.ndarray:
        """The distinct tokens, in order of first occurrence -> int64 [distinct]."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> np.ndarray:
        """How often each of `ids` occurred -> float32 [distinct]."""
        return self._counts[: len(self._index)]


class RowState:
    """One row of the sampler. Created from a RowInit (again after a preemption, with the same outcome).

    Args:
        grammar: at its start; None = it has none.

    Attributes:
        params: its sampling parameters; the seed is set.
        choice: index among n choices, part of the noise key.
        first: position of the first generated token (the prompt's length).
        held_ids: ids masked until min_tokens are generated, int64.
        allowed: the only tokens that may be drawn, as a mask of `grammar.allowed`; None = all.
        adjusts: something changes single logits before a draw.
        grammar: what says which tokens may come next, but in its reasoning.
        thinking: where it is in that; None = nobody asks.
        end_ids: ids that end it, int64.
        output: counts of generated tokens; None if no penalty needs them.
        seen: counts of prompt and generated tokens; None if no penalty needs them.
        bias_ids, bias: logit_bias as arrays, int64 and float32.
    """

    __slots__ = (
        "_tail", "adjusts", "allowed", "bias", "bias_ids", "choice", "end_ids", "first", "grammar", "held_ids",
        "output", "params", "seed", "seen", "thinking",
    )  # fmt: skip

    def __init__(self, init: RowInit, grammar: GrammarState | None = None) -> None:
        params = init.params
        if params.seed is None:
            raise ValueError(f"row {init.id!r} has no seed; it is set when a request is admitted")
        self.params = params
        self.seed = params.seed
        self.choice = init.choice
        self.grammar = grammar
        self.thinking = None if params.thinking is None else ThinkingState(params.thinking)
        self.end_ids = np.array(init.stop_ids, np.int64)
        if grammar is not None or self.thinking is not None:
            for token in init.tokens[init.prompt_len :]:
                self._follow(token)
        self.first = init.prompt_len
        self.held_ids = np.array(init.stop_ids if params.min_tokens else (), np.int64)
        counts_output = params.presence_penalty != 0 or params.frequency_penalty != 0
        self.output = TokenCounts(init.tokens[init.prompt_len :]) if counts_output else None
        self.seen = TokenCounts(init.tokens) if params.repetition_penalty != 1 else None
        self.bias_ids = np.array([token for token, _ in params.logit_bias], np.int64)
        self.bias = np.array([bias for _, bias in params.logit_bias], np.float32)
        self.allowed: np.ndarray | None = None
        if params.allowed_token_ids:
            ids = np.array(params.allowed_token_ids, np.int64)
            self.allowed = only(ids, int(ids.max()) + 1)
        self._tail = list(init.tokens[init.prompt_len :])[-MAX_BAD:] if params.bad_token_ids else None
        holds = (len(self.held_ids) or params.bad_token_ids) and grammar is None
        self.adjusts = bool(counts_output or self.seen is not None or len(self.bias_ids) or holds)

    def prepare(self) -> None:
        """Have the grammar's next mask worked out, if the next token is the grammar's."""
        if self.grammar is not None and not (self.thinking is not None and self.thinking.active):
            self.grammar.compute()

    def mask(self, position: int, vocab: int) -> np.ndarray | None:
        """The tokens that may come next by its grammar, its reasoning and `allowed`, a bit each, the lowest first ->
        uint32 [words]; None = all.

        Raises:
            RowFailure: the grammar cannot be followed any further, or not by an allowed token.
        """
        thinking = self.thinking
        if thinking is not None and thinking.active:
            if thinking.forced is not None:
                return only(np.array([thinking.forced]), vocab)
            # A text that must follow a grammar does not end before it begins to.
            return self.allowed if self.grammar is None else self._allowed_of(~only(self.end_ids, vocab))
        if self.grammar is None:
            return self.allowed
        words = self.grammar.mask(self.forbidden(position))
        if thinking is not None and thinking.undecided:
            words = words | only(np.array([thinking.start]), len(words) * WORD)
        return self._allowed_of(words)

    def _allowed_of(self, words: np.ndarray) -> np.ndarray:
        if self.allowed is None:
            return words
        width = min(len(words), len(self.allowed))
        both = words[:width] & self.allowed[:width]
        if not both.any():
            raise RowFailure("of the tokens in allowed_token_ids, none goes on with a text that the grammar allows")
        return both

    @property
    def masks(self) -> bool:
        """Whether `mask` may forbid something."""
        return self.grammar is not None or self.thinking is not None or self.allowed is not None

    def forbidden(self, position: int) -> np.ndarray:
        """Ids that may not be drawn at `position`: those that would stop it too early or end a bad sequence."""
        held = self.held_ids if self.holds(position) else self.held_ids[:0]
        if self._tail is None:
            return held
        ends = [ids[-1] for ids in self.params.bad_token_ids if _ends_with(self._tail, ids[:-1])]
        return np.concatenate((held, np.array(ends, np.int64)))

    def holds(self, position: int) -> bool:
        """Whether the token at `position` comes before min_tokens are generated."""
        return position - self.first < self.params.min_tokens

    def fitting(self, tokens: Sequence[int]) -> int:
        """How many of these ids its grammar takes next; all where none binds it yet."""
        thinking = self.thinking
        if self.grammar is None or (thinking is not None and (thinking.active or thinking.undecided)):
            return len(tokens)
        return self.grammar.fitting(tokens)

    def observe(self, token: int) -> None:
        """Count a token that became part of the row."""
        if self.output is not None:
            self.output.add(token)
        if self.seen is not None:
            self.seen.add(token)
        if self._tail is not None:
            self._tail = [*self._tail, token][-MAX_BAD:]
        self._follow(token)

    def _follow(self, token: int) -> None:
        in_reasoning = self.thinking is not None and self.thinking.take(token)
        if self.grammar is not None and not in_reasoning:
            self.grammar.take(token)


def only(ids: np.ndarray, vocab: int) -> np.ndarray:
    """A mask of nothing but `ids` -> uint32 [ceil(vocab / WORD)]."""
    words = np.zeros(-(-vocab // WORD), np.uint32)
    np.bitwise_or.at(words, ids // WORD, np.uint32(1) << (ids % WORD).astype(np.uint32))
    return words


def _ends_with(tokens: list[int], ids: Sequence[int]) -> bool:
    return len(ids) <= len(tokens) and tuple(tokens[len(tokens) - len(ids) :]) == tuple(ids)


def check_params(params: SamplingParams, vocab: int) -> None:
    """Refuse token ids that the model does not have; call it once, when a request is admitted.

    Raises:
        BadInput: a field names an id that is not below `vocab`.
    """
    for field, ids in (
        ("logit_bias", [token for token, _ in params.logit_bias]),
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        *(("bad_token_ids", ids) for ids in params.bad_token_ids),
    ):
        for token in ids:
            if token >= vocab:
                raise BadInput(field, f"token id {token} is not below the model's vocabulary size, {vocab}")
    ids = [token for token, _ in params.logit_bias]
    if len(set(ids)) < len(ids):
        raise BadInput("logit_bias", "names a token id twice")
