"""Grammars compiled for one model's tokens, and the rows that follow them.

    Grammar --compile, in a thread that steps back for the engine--> kept here --state--> a row's own place in it

Compiling neither holds Python's lock nor the step: a request waits for its grammar, others do not.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from headway.core.errors import BadInput, Reject, Rejected
from headway.core.grammar import Grammar
from headway.roofline.memory import GRAMMARS
from headway.sampling.grammar import GrammarState
from headway.sampling.rows import only
from headway.text.aside import step_back
from headway.text.grammar_worker import limits, sentence
from headway.text.tokenizer import Tokenizer

MOST = 1024  # compiled grammars at once, and those that nobody follows just now
ROOM = GRAMMARS  # bytes that they take together
EACH, PER_CHARACTER = 64 << 10, 64  # bytes of a compiled one, about, and for each character of its source
FOLLOWED = 16  # tokens of this model: what they lead to may be far more than what bytes do
_STACK = 256 << 20  # bytes, reserved and not used: grammars that need more end the checker's process, which has less


class Grammars:
    """Compiles grammars, and remembers the latest. `state` belongs to the thread that drives the engine.

    Who follows a grammar keeps the future that `begin` gave: while it is kept the grammar is here, and counted. Beyond
    `MOST`, or `ROOM`, those that nobody keeps are forgotten, and where that is not enough, no more are taken.

    Args:
        tokenizer: of the model; looked at when the first grammar comes, or by `warm`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()  # the latest, whoever follows them
        self._here: WeakValueDictionary[Grammar, Future[LLMatcher]] = WeakValueDictionary()  # all
        self._pool: ThreadPoolExecutor | None = None

    def warm(self) -> None:
        """Do now what depends on the tokenizer alone. That holds Python's lock: for 262144 tokens, two seconds."""
        if self._tokens is None and self._tokenizer.eos_ids:
            self._tokens = _ll_tokenizer(self._tokenizer)

    def begin(self, grammar: Grammar) -> Future[LLMatcher]:
        """Start to compile a grammar, if it is not here yet.

        Args:
            grammar: as `text.grammar` made it.

        The future raises BadInput if llguidance does not take it, or this model has no token to end a text with.

        Raises:
            Rejected: other requests follow so many that there is no room; BadInput: there never is.
        """
        with self._lock:
            future = self._here.get(grammar)
            if future is None:
                self._make_room(size_of(grammar))
                future = self._here[grammar] = self._thread().submit(self._compile, grammar)
            self._kept[grammar] = future
            self._kept.move_to_end(grammar)
        return future

    def _make_room(self, size: int) -> None:
        if size > ROOM:
            raise BadInput("grammar", f"compiled it could take {size >> 20} MiB, and {ROOM >> 20} are there for all")
        while len(self._here) >= MOST or self.bytes + size > ROOM:
            if not self._kept:
                problem = "the grammars of other requests take all the room there is; try again"
                raise Rejected(Reject.QUEUE_FULL, problem, retry_after=1.0)
            self._kept.popitem(last=False)

    @property
    def bytes(self) -> int:
        """What those that are here take, about."""
        return sum(map(size_of, list(self._here)))

    def check_allowed(self, grammar: Grammar, ids: Sequence[int]) -> None:
        """
        Raises:
            BadInput: a text of a grammar that is compiled here begins with none of these token ids.
        """
        vocab = self._tokenizer.vocab_size
        known = np.array([id for id in ids if id < vocab], np.int64)
        if not (self.state(grammar).mask() & only(known, vocab)).any():
            raise BadInput("allowed_token_ids", "none of these tokens begins a text that the grammar allows")

    def state(self, grammar: Grammar) -> GrammarState:
        """A row's own place in a grammar that its request keeps here, at its start."""
        matcher = self.begin(grammar).result()
        return GrammarState(matcher.deep_copy(), self._tokenizer.vocab_size)

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
                self._pool = None
            self._kept.clear()
            self._here.clear()

    def _thread(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar", initializer=step_back)
            before = threading.stack_size(_STACK)
            self._pool.submit(int)  # the thread starts with this
            threading.stack_size(before)
        return self._pool

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if self._tokens is None:
            self._tokens = _ll_tokenizer(self._tokenizer)
        matcher = LLMatcher(self._tokens, grammar.source, log_level=0, limits=limits())
        problem = matcher.get_error() or self._followed(matcher.deep_copy())
        if problem:
            raise BadInput("grammar", sentence(problem))
        return matcher

    def _followed(self, row: LLMatcher) -> str:
        """What is wrong with a grammar within its first tokens. The states made on the way stay with the grammar."""
        for _ in range(FOLLOWED):
            mask = np.unpackbits(np.frombuffer(row.compute_bitmask(), np.uint8), bitorder="little")
            ids = np.flatnonzero(mask[: self._tokenizer.vocab_size])
            if row.is_error() or not len(ids):
                break
            row.consume_token(int(ids[len(ids) // 2]))
            if row.is_error() or row.is_stopped():
                break
        return row.get_error()


def size_of(grammar: Grammar) -> int:
    """Bytes that it takes when it is compiled, about."""
    return EACH + PER_CHARACTER * len(grammar.source)


class _Vocabulary:
    """A tokenizer as llguidance takes one: the bytes of every token."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(id, skip_special=False) for id in range(tokenizer.vocab_size)]
        self.special_token_ids = [id for id in tokenizer.special_ids.values() if id < tokenizer.vocab_size]
        self.eos_token_id = tokenizer.eos_ids[0]

    def __call__(self, text: str | bytes) -> list[int]:
        given = text if isinstance(text, str) else text.decode(errors="replace")
        return self._tokenizer.encode(given, add_special=False, allow_special=False)


def _ll_tokenizer(tokenizer: Tokenizer) -> LLTokenizer:
    if not tokenizer.eos_ids:
        raise BadInput("grammar", "this model names no token that ends a text, so a grammar would have no end")
    return LLTokenizer(
        _Vocabulary(tokenizer),  # type: ignore[arg-type]
        n_vocab=tokenizer.vocab_size,
        eos_token=list(tokenizer.eos_ids),
        slices=LLTokenizer.json_slices(),
    )
