"""What is sent in a simulation: requests with a length that nobody but the simulated model knows.

Tokens are made up. Unless prompts share something, or nothing is cached, token `position` of request `number` is like
no other, so prefixes hit only where the workload says that they are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from headway.core.clock import to_ps
from headway.core.errors import BadInput
from headway.core.request import Request, SamplingParams
from headway.core.step import RowInit
from headway.traffic.traces import TraceRow

END = -1  # the token that ends an answer
PARAMS = SamplingParams(seed=0)
BITS = 24  # of a position in a made-up token
LONGEST = 1 << BITS


class Ask(msgspec.Struct, gc=False):
    """One request.

    Attributes:
        number: unique; its id is this in decimal.
        at: when it arrives, ps.
        prompt: its tokens.
        output: tokens of its answer, the last one END; the scheduler is not told.
        most: tokens it asks for at most (max_tokens); None = whatever the context holds.
        priority, tenant: as of a request.
        patience: ps after its arrival at which it is aborted; None = never.
        turn: which turn of its session it is, from 0. session: its session's name; "" = it is of none.
    """

    number: int
    at: int
    prompt: Sequence[int]
    output: int
    most: int | None = None
    priority: int = 0
    tenant: str = ""
    patience: int | None = None
    turn: int = 0
    session: str = ""

    def request(self, longest: int) -> Request:
        """As the engine would hand it to the scheduler, whose context holds `longest` tokens."""
        length = len(self.prompt)
        return Request(
            str(self.number),
            self.prompt,
            PARAMS,
            stop_ids=_ENDS,
            max_len=longest if self.most is None else length + self.most,
            arrival=self.at,
            priority=self.priority,
            deadline=None if self.patience is None else self.at + self.patience,
            tenant=self.tenant,
        )


_ENDS = frozenset({END})


class Answers:
    """What a simulated model says: tokens like no others, and END where an answer is as long as it was to be.

    Args:
        alike: all tokens but the last may be the same, because nobody compares them.
    """

    def __init__(self, alike: bool = False) -> None:
        self.alike = alike
        self._ends: dict[str, tuple[int, int]] = {}  # id -> (base of its tokens, position of its last token)

    def expect(self, ask: Ask) -> None:
        self._ends[str(ask.number)] = (ask.number << BITS, len(ask.prompt) + ask.output - 1)

    def forget(self, id: str) -> None:
        self._ends.pop(id, None)

    def token(self, row: RowInit, position: int) -> int:
        base, last = self._ends[row.id]
        return END if position >= last else base | position

    def left(self, id: str, position: int) -> int:
        """Tokens from `position` to its end."""
        return self._ends[id][1] - position + 1

    def run(self, id: str, position: int, count: int) -> list[int]:
        """The tokens from `position` on, none of them after the end."""
        base, last = self._ends[id]
        tokens = [0] * count if self.alike else list(range(base + position, base + position + count))
        if position + count > last:
            tokens[-1] = END
        return tokens


def made_up(number: int, tokens: int, shared: Sequence[int] = ()) -> list[int]:
    """A prompt that begins like others with `shared` and goes on like no other."""
    check_prompt(tokens)
    base = number << BITS
    return [*shared[:tokens], *range(base + min(len(shared), tokens), base + tokens)]


def check_prompt(tokens: int) -> None:
    """BadInput unless a prompt can have so many tokens."""
    if not 0 < tokens < LONGEST:
        raise BadInput("--input-tokens", f"{tokens}; accepted: from 1 to below {LONGEST}")


def of_row(number: int, row: TraceRow, shared: Sequence[int] = ()) -> Ask:
    """A recorded request: equal block ids are equal tokens at equal places. `shared`: what all begin with, where the
    record says nothing."""
    begin = list(shared)
    for block in row.blocks:
        left = row.input_tokens - len(begin)
        if left <= 0 or row.input_tokens >= LONGEST:
            break
        base = -2 - (block << BITS)
        begin.extend(range(base, base - min(row.block_tokens, left), -1))
    return Ask(number, to_ps(row.at), made_up(number, row.input_tokens, begin), row.output_tokens)
