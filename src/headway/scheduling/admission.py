"""Who may come in during one step: whether there is a row and blocks for a waiting request, and what it can share.

Admission is optimistic: a row's known tokens (its worst case, if strict) must fit beside what running rows are still
promised, and one more block for each of them and for itself. Alone a request always fits: `Scheduler.add` made sure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.cache.hashing import agreeing
from headway.cache.kv import Hit
from headway.core.step import Work
from headway.scheduling.row import Place, Row
from headway.scheduling.state import State

OVERTAKING_BATCHES = 2  # full batches that may pass a row whose blocks are not there, before they are kept for it


class Admission:
    """The room of one step, as rows are admitted to it.

    Args:
        headroom: leave a block for each running row and the one that comes in, if a row can need a second one.

    Attributes:
        first: the row that has waited longest, if any does and the policy is fair.
    """

    def __init__(self, state: State, headroom: bool = True) -> None:
        self._state = state
        self._headroom = headroom and state.limits.block_size < state.limits.max_model_len
        self._promised: list[int] | None = None  # blocks by group; O(rows), so only once somebody may be admitted
        self._sharing = 0  # waiting rows that will share what this step computes: each keeps a place
        self._row_for_first = 0
        self._kept: list[int] = [0] * len(state.cache.pools)  # blocks for the first row
        self._passing = False  # whoever comes in passes the first row, whose blocks are not there
        self.first: Row | None = None

    def keep_for(self, first: Row, oldest: bool) -> None:
        """The first waiting row has not to fear those that come in before it: what it needs is kept, if it is there; if
        not, others may pass, until they were too many.

        oldest: no prompt has waited longer, running ones included; so a row is kept too.
        """
        self.first = first
        self._row_for_first = int(oldest)
        hit, _ = self.prefix(first)
        fits = self.fits(first, hit)
        self._passing = not fits
        if fits or first.overtaken >= OVERTAKING_BATCHES * self._state.limits.max_rows:
            self._kept = self._needs(first, hit)

    def has_row(self, row: Row) -> bool:
        """The executor can hold one more."""
        kept = 0 if row is self.first else self._row_for_first
        return len(self._state.running) + self._sharing + kept < self._state.limits.max_rows

    def prefix(self, row: Row) -> tuple[Hit, bool]:
        """What a waiting row need not compute, and whether it is forked from its parent's prompt."""
        request, parent = row.request, row.parent
        if parent is not None and not request.generated and _has_computed(parent, request.prompt_len):
            hit = parent.table.forkable(request.prompt_len - 1)
            if hit is not None:
                return hit, True
        if row.uncached:
            return self._state.cache.lookup((), ()), False
        return row.table.lookup(request.tokens), False

    def start(self, row: Row, hit: Hit, fork: bool) -> int:
        """The first position it computes."""
        return row.request.prompt_len - 1 if fork else hit.length * self._state.cache.block_size

    def remaining(self, row: Row) -> int:
        """Tokens it computes before its next one is drawn."""
        return len(row.request.tokens) - self.start(row, *self.prefix(row))

    def fits(self, row: Row, hit: Hit) -> bool:
        """Whether its blocks are there."""
        if self._promised is None:
            self._promised = [
                sum(self._promise(row, group) for row in self._state.running) for group in range(len(self._kept))
            ]
        headroom = len(self._state.running) + 1 if self._state.running and self._headroom else 0
        kept = [0] * len(self._kept) if row is self.first else self._kept
        needs = self._needs(row, hit)
        pools = self._state.cache.pools
        return all(
            pool.available - promised - held - headroom >= need
            for pool, promised, held, need in zip(pools, self._promised, kept, needs, strict=True)
        )

    def could_fit(self, row: Row, without: Sequence[Row]) -> bool:
        """Whether its row and blocks would be there without some of the running rows."""
        hit, _ = self.prefix(row)
        running = [one for one in self._state.running if one not in without]
        headroom = len(running) + 1 if running and self._headroom else 0
        for group, (pool, need) in enumerate(zip(self._state.cache.pools, self._needs(row, hit), strict=True)):
            promised = sum(self._promise(one, group) for one in running)
            given = sum(one.table.held(group) for one in without)
            if pool.available + given - promised - headroom < need:
                return False
        return len(running) < self._state.limits.max_rows

    def anew(self) -> Admission:
        """The room after blocks were taken back."""
        return Admission(self._state, self._headroom)

    def coming(self, row: Row, hit: Hit, work: Iterable[tuple[Row, Work]], alone: int) -> int:
        """Tokens from the start that rows of this step are about to compute and that a waiting row could share; 0 if it
        had better not wait for them. It should if they are at least half of what it would compute otherwise, and if
        sharing is no slower than computing `alone` tokens a step.
        """
        if row.uncached or not self._state.cache.reuse:
            return 0
        size, tokens = self._state.cache.block_size, row.request.tokens
        rest = len(tokens) - hit.length * size
        names = row.table.name_blocks(tokens, (len(tokens) - 1) // size)
        best = 0
        for other, one in work:
            full = len(other.request.tokens) // size
            if other.table.sealed >= full:
                continue
            common = agreeing(names, other.table.name_blocks(other.request.tokens, full))
            steps = -(-(common * size - one.start) // one.count)
            worth = common > other.table.sealed and 2 * (common - hit.length) * size >= rest
            if worth and steps <= -(-rest // max(1, alone)):
                best = max(best, common * size)
        return best

    def share(self, row: Row, common: int) -> None:
        """A waiting row waits on, to share `common` tokens: it keeps a place, and its blocks."""
        self._sharing += 1
        self.promise_to(row)
        self._state.queue.rerank(row, len(row.request.tokens) - common)

    def admitted(self, row: Row) -> None:
        """A row came in."""
        if row is self.first:
            self._row_for_first, self._kept, self._passing = 0, [0] * len(self._kept), False
        elif self._passing and self.first is not None and row.order > self.first.order:
            self.first.overtaken += 1

    def promise_to(self, row: Row, sign: int = 1) -> None:
        """Count the blocks that a row may still take; sign -1: no more, for it takes some."""
        for group in range(len(self._promised or ())):
            self._promised[group] += sign * self._promise(row, group)  # type: ignore[index]

    def _needs(self, row: Row, hit: Hit) -> list[int]:
        """Per group, blocks that are available no more once it is admitted: new ones, and cached ones it revives."""
        needs = []
        for group, pool in enumerate(self._state.cache.pools):
            shared: Sequence[int] = hit.blocks[group][hit.first[group] :]
            revived = sum(pool.refs[block] == 0 for block in shared)
            needs.append(self._state.cache.holding(group, _claim(row)) - len(shared) + revived)
        return needs

    def _promise(self, row: Row, group: int) -> int:
        """Blocks promised to a row at its admission that it has not taken yet."""
        if row.place is Place.RUNNING and row.request.todo <= 1 and not row.strict:
            return 0
        return max(0, self._state.cache.holding(group, _claim(row)) - row.table.held(group))


def _has_computed(row: Row, tokens: int) -> bool:
    """The row is live, and its first `tokens` are in blocks of its own."""
    return row.place is Place.RUNNING and row.request.finish is None and row.request.computed >= tokens


def _claim(row: Row) -> int:
    """Tokens a row must have place for: the known ones, or all there can ever be (the last is not cached)."""
    return row.request.max_len - 1 if row.strict else len(row.request.tokens)
