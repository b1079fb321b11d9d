"""Prompt lookup: what followed the last tokens the last time they occurred in the request itself.

    tokens   ... a b c d e f ......... a b c | d e f        the draft
                       ^ at                  ^ here

Code, JSON, tables, quotations and edits repeat themselves for long stretches. While they do, the place to copy from
only moves on with the row; otherwise it is looked up anew. Nothing is computed: a draft is free until it is verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.core.step import StepPlan
from headway.speculation.acceptance import Share
from headway.speculation.proposer import Proposal

LOOKED_AT = 16  # earlier places with the same two tokens before them
COMPARED = 32  # tokens before a place, to tell the best one
INDEXED = 4096  # tokens that are indexed in one step: a long prompt does not hold a step up
REMEMBERED = 1 << 16  # tokens that are indexed; then the older half is forgotten
PRIORS = (0.0, 0.0, 0.35, 0.55, 0.75, 0.85, 0.9)  # share of drafts accepted by bits of the length of the match
OWN_WEIGHT, SHARED_WEIGHT = 3.0, 8.0  # tries that a prior counts as: of a row, and of all


class SuffixIndex:
    """Where each pair of neighbouring tokens of a row occurred, the latest place first. O(1) per token in time and
    memory. Tokens are only ever appended."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], int] = {}  # pair -> where it was followed by something
        self._earlier: list[int] = []  # of the place at `_first` + index: the one before with the same pair, or -1
        self._first = 2

    @property
    def end(self) -> int:
        """The first place that is not indexed."""
        return self._first + len(self._earlier)

    def extend(self, tokens: Sequence[int], end: int) -> None:
        """Index the places below `end`: what stands there is known, and what is before it."""
        if len(self._earlier) >= REMEMBERED:
            self._forget(tokens)
        latest, earlier = self._latest, self._earlier
        for place in range(self.end, end):
            pair = (tokens[place - 2], tokens[place - 1])
            earlier.append(latest.get(pair, -1))
            latest[pair] = place

    def _forget(self, tokens: Sequence[int]) -> None:
        first, end = self.end - REMEMBERED // 2, self.end
        self._latest, self._earlier, self._first = {}, [], first
        self.extend(tokens, end)

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(the place before which the most tokens are those at the end, the latest of several; how many are).
        (0, 0) if there is none."""
        end = len(tokens)
        place = self._latest.get((tokens[-2], tokens[-1]), -1) if end >= 2 else -1
        best, longest = 0, 0
        for _ in range(LOOKED_AT):
            if place < self._first:
                break
            length = 2
            while length < COMPARED and length < place and tokens[place - 1 - length] == tokens[end - 1 - length]:
                length += 1
            if length > longest:
                best, longest = place, length
                if length == COMPARED:
                    break
            place = self._earlier[place - self._first]
        return best, longest


class _Row:
    """What is remembered of a row."""

    __slots__ = ("at", "draft", "index", "known", "length", "shares")

    def __init__(self) -> None:
        self.index = SuffixIndex()
        self.at = self.length = 0  # the place to copy from next, and how many tokens before it agree
        self.known = 0  # tokens when it proposed last
        self.draft: tuple[int, ...] = ()
        self.shares: dict[int, Share] = {}


class NgramProposer:
    """The proposer `ngram`. It learns how often matches of each length go on, whether a draft is verified or not: what
    was drawn tells."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}
        self._shares = [Share(prior, SHARED_WEIGHT) for prior in PRIORS]  # of all rows

    def step(self, plan: StepPlan) -> dict[str, Proposal]:
        for id in plan.gone:
            self._rows.pop(id, None)
        for row in plan.new:
            self._rows[row.id] = _Row()
        return {}

    def reset(self) -> None:
        self._rows.clear()

    def propose(self, rows: Iterable[tuple[str, Sequence[int]]], most: int) -> dict[str, Proposal]:
        proposals = {}
        for id, tokens in rows:
            row = self._rows[id]
            self._catch_up(row, tokens)
            if row.length and most > 0:
                row.draft = _copied(tokens, row.at, most)
                proposals[id] = Proposal(row.draft, self._odds(row, row.length))
        return proposals

    def _catch_up(self, row: _Row, tokens: Sequence[int]) -> None:
        """Learn from what was drawn since, and find the place that the row is at now."""
        new = len(tokens) - row.known
        if row.draft:
            self._learn(row, tokens)
            row.draft = ()
        if row.length and tokens[row.at : row.at + new] == tokens[row.known :]:
            row.at, row.length = row.at + new, row.length + new
        else:
            row.at = row.length = 0
        row.known = len(tokens)
        row.index.extend(tokens, min(len(tokens), row.index.end + INDEXED))
        if not row.length:
            row.at, row.length = row.index.find(tokens)

    def _learn(self, row: _Row, tokens: Sequence[int]) -> None:
        for offset, (drafted, drawn) in enumerate(zip(row.draft, tokens[row.known :], strict=False)):
            kind = _kind(row.length + offset)
            self._shares[kind].learn(drafted == drawn)
            row.shares.setdefault(kind, Share(0.0, OWN_WEIGHT)).learn(drafted == drawn)
            if drafted != drawn:
                break

    def _odds(self, row: _Row, length: int) -> float:
        kind = _kind(length)
        shared, own = self._shares[kind].estimate(), row.shares.get(kind)
        return shared if own is None else own.estimate(shared)


def _kind(length: int) -> int:
    """Matches whose lengths have as many bits are of a kind."""
    return min(length.bit_length(), len(PRIORS) - 1)


def _copied(tokens: Sequence[int], at: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `at` on; what lies beyond the end is what is copied itself, as in LZ77."""
    period = len(tokens) - at
    return tuple([tokens[at + index % period] for index in range(count)])
