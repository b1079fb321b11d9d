"""Grammars made ready for an engine: tried in a process that may be ended, and put into llguidance's own form.

    a Grammar --GrammarChecker, in the API's process--> Grammar("compiled", ...) --executor.grammars--> masks of tokens

What was tried once is remembered: clients send the same schema with every request.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from headway.core.errors import BadInput
from headway.core.grammar import Grammar
from headway.text.guarded import Bounds, GuardedProcess, WorkerEnded

_WORKER = Path(__file__).with_name("grammar_worker.py")
_LIMITS = Bounds(cpu_seconds=10.0, wall_seconds=60.0, memory=1 << 30)
_REMEMBERED = 32 << 20  # characters of grammars, in both forms


class GrammarChecker:
    """Tries grammars, one at a time, in a process of its own that starts with the first one. Thread-safe.

    Args:
        control: ids of the model's control tokens by name; a grammar may ask for either.
    """

    def __init__(self, control: Mapping[str, int] = MappingProxyType({})) -> None:
        self._control = msgspec.msgpack.encode(dict(control))
        self._process: GuardedProcess | None = None
        self._asking = threading.Lock()
        self._memory = threading.Lock()
        self._known: OrderedDict[Grammar, Grammar | str] = OrderedDict()
        self._size = 0

    def known(self, grammar: Grammar, field: str = "grammar") -> Grammar | None:
        """As `check`, if it was checked before; else None, at once."""
        with self._memory:
            answer = self._known.get(grammar)
            if answer is not None:
                self._known.move_to_end(grammar)
        return None if answer is None else _good(answer, field)

    def check(self, grammar: Grammar, field: str = "grammar") -> Grammar:
        """Its compiled form. Takes milliseconds, or seconds for one of a megabyte.

        Args:
            field: what the user calls it.

        Raises:
            BadInput: llguidance does not take it, it allows no text, or it takes too much time or memory.
        """
        known = self.known(grammar, field)
        if known is not None:
            return known
        with self._asking:
            known = self.known(grammar, field)  # by who asked before
            if known is not None:
                return known
            answer = self._ask(grammar)
            self._remember(grammar, answer)
        return _good(answer, field)

    def close(self) -> None:
        """End the process; checking afterwards starts a new one."""
        with self._asking:
            self._drop()

    def _ask(self, grammar: Grammar) -> Grammar | str:
        if self._process is None or self._process.ended:
            self._process = GuardedProcess(_WORKER, _LIMITS, first=[self._control])
        try:
            answer = self._process.ask(msgspec.msgpack.encode((grammar.kind, grammar.source)))
        except WorkerEnded as error:
            self._drop()
            return f"it is too complex to be compiled: {error}"
        outcome, text = msgspec.msgpack.decode(answer, type=tuple[str, str])
        return Grammar("compiled", text) if outcome == "ok" else text

    def _drop(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None

    def _remember(self, grammar: Grammar, answer: Grammar | str) -> None:
        with self._memory:
            self._known[grammar] = answer
            self._size += _size(grammar, answer)
            while self._size > _REMEMBERED:
                self._size -= _size(*self._known.popitem(last=False))


def _good(answer: Grammar | str, field: str) -> Grammar:
    if isinstance(answer, str):
        raise BadInput(field, answer)
    return answer


def _size(grammar: Grammar, answer: Grammar | str) -> int:
    return len(grammar.source) + len(answer if isinstance(answer, str) else answer.source) + 256
