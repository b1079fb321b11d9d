"""Grammars compiled for one model's tokens, and the rows that follow them.

    Grammar --compile, in a thread that steps back for the engine--> kept here --state--> a row's own place in it

Compiling neither holds Python's lock nor the step: a request waits for its grammar, others do not.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from headway.core.errors import BadInput
from headway.core.grammar import Grammar
from headway.sampling.grammar import GrammarState
from headway.text.aside import step_back
from headway.text.tokenizer import Tokenizer

KEPT = 128  # compiled grammars
KEPT_CHARACTERS = 2 << 20  # of their sources together: a compiled one takes some hundred times as many bytes
_STACK = 256 << 20  # bytes, reserved and not used: grammars that need more end the checker's process, which has less


class Grammars:
    """Compiles grammars, and remembers the latest. `begin` and `state` belong to the thread that drives the engine.

    Args:
        tokenizer: of the model; looked at when the first grammar comes, or by `warm`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._characters = 0  # of the sources of those
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
        """
        with self._lock:
            future = self._kept.get(grammar)
            if future is None:
                future = self._kept[grammar] = self._thread().submit(self._compile, grammar)
                self._characters += len(grammar.source)
                while len(self._kept) > 1 and (len(self._kept) > KEPT or self._characters > KEPT_CHARACTERS):
                    self._characters -= len(self._kept.popitem(last=False)[0].source)
            self._kept.move_to_end(grammar)
        return future

    def state(self, grammar: Grammar) -> GrammarState:
        """A row's own place in a grammar, at its start; one that is not here any more is compiled again, now."""
        matcher = self.begin(grammar).result()
        return GrammarState(matcher.deep_copy(), self._tokenizer.vocab_size)

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
                self._pool = None
            self._kept.clear()
            self._characters = 0

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
        matcher = LLMatcher(self._tokens, grammar.source, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first one may take long, and shows what cannot be followed
        if matcher.is_error():
            raise BadInput("grammar", matcher.get_error().partition("\n")[0])
        return matcher


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
