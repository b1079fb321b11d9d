"""A smaller model that drafts for the one that is served: the proposer behind `--draft MODEL`.

    step t     the scheduler plans k drafts for a row without knowing them: UNKNOWN, k times
    step t+1   the small model says them (k passes over the rows), the large one verifies them in its step

Its keys and values live in blocks of the same ids as those of the large model's first group that keeps all tokens: who
owns, shares, copies or takes back a block there has decided for this cache too, and nothing is allocated twice.
What it computed lags behind where nobody wants drafts. So it keeps the ids of the blocks that it has filled; a row goes
on behind those at its beginning, and whatever else it has is computed anew, a piece per step.

Both models draw with the same noise for the same position ("coupled"), so that they agree as often as their
distributions let them; with `rejection`, drafts are drawn with noise of their own, and their distributions kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from headway.core.request import SamplingParams
from headway.core.step import Capabilities, RowInit, StepPlan, Work
from headway.executor.batch import BatchRow, BatchRows
from headway.ops.protocol import Backend, CacheLayout, Forward, Program
from headway.sampling.noise import DRAFT, dense_uniforms
from headway.sampling.operations import AnyLogits
from headway.sampling.pipeline import distribution
from headway.sampling.rows import RowFailure, RowState
from headway.sampling.sampler import Sampler
from headway.sampling.verify import race
from headway.shape.model import KVGroup
from headway.speculation.acceptance import Share
from headway.speculation.proposer import UNKNOWN, Proposal

LAG = 32  # tokens of a row that were not computed yet, up to which it drafts: they are computed with the first draft
AT_ONCE = 64  # tokens that are caught up with in a step, or as many as the large model computes of prompts
PRIOR, OWN_WEIGHT, SHARED_WEIGHT = 0.7, 3.0, 8.0  # share of drafts accepted before any was; tries that it counts as


class DraftRow:
    """A row here.

    Attributes:
        row: its tokens, blocks and slot.
        done: its first tokens whose keys and values are cached.
        filled: of its blocks, how many at the beginning are known to be filled.
        known: tokens when it was last told. draft: what it said behind them.
        distributions: float64 [vocab] each, that these were drawn from, where they were drawn apart.
        state: what it is sampled by.
    """

    __slots__ = ("distributions", "done", "draft", "filled", "known", "row", "share", "state")

    def __init__(self, row: BatchRow, filled: int, block_size: int) -> None:
        self.row = row
        self.state = RowState(row.init)
        self.distributions: list[np.ndarray] = []
        self.filled = filled
        self.done = filled * block_size
        self.known = len(row.tokens)
        self.draft: tuple[int, ...] = ()
        self.share = Share(PRIOR, OWN_WEIGHT)

    @property
    def lag(self) -> int:
        """Tokens that it knows and has not computed."""
        return self.known - self.done


class ModelProposer:
    """The proposer of a smaller model, on a backend of its own.

    Args:
        backend, forward, groups: of the small model.
        limits: of the large one. group: whose blocks they share.
        context: the longest that the small model can look back on.
        mode: as in `sampling.verify`.
    """

    def __init__(
        self,
        backend: Backend,
        forward: Forward,
        groups: tuple[KVGroup, ...],
        limits: Capabilities,
        group: int,
        context: int,
        mode: str = "coupled",
    ) -> None:
        self._limits = draft_limits(limits, group, len(groups))
        self._group = group
        self._context = context
        self._backend = backend
        self._independent = mode == "rejection"
        backend.allocate(CacheLayout(groups, self._limits.blocks, limits.block_size))
        self._program: Program = backend.compile(forward)
        self._shared = Share(PRIOR, SHARED_WEIGHT)
        self._filled: set[int] = set()  # ids of blocks
        self.reset()

    def reset(self) -> None:
        self._batch = BatchRows(self._limits)
        self._rows: dict[str, DraftRow] = {}
        self._sampler = Sampler(self._limits.max_rows, self._backend)

    def step(self, plan: StepPlan) -> dict[str, Proposal]:
        self._apply(plan)
        promised = {work.id: len(work.draft) for work in plan.work if UNKNOWN in work.draft}
        wanted = {id: count for id, count in promised.items() if self._rows[id].lag <= LAG}
        self._compute([*self._first_drafts(wanted), *self._catching_up(plan, wanted)], wanted)
        for place in range(1, max(wanted.values(), default=0)):
            rows = [(id, self._rows[id]) for id, count in wanted.items() if count > place]
            self._compute([Work(id, row.done, 1, logits=1, sample=True) for id, row in rows], wanted)
        guesses = {id: Proposal((0,) * count, 0.0) for id, count in promised.items()}  # of rows begun anew meanwhile
        return guesses | {id: self._proposal(self._rows[id]) for id in wanted}

    def propose(self, rows: Iterable[tuple[str, Sequence[int]]], most: int) -> dict[str, Proposal]:
        offers = {}
        if not any(row.draft for row in self._rows.values()):
            self._shared.fade()  # what was refused once is tried again in a while
        for id, tokens in rows:
            row = self._rows[id]
            self._learn(row, tokens)
            row.row.put(row.known, tokens[row.known :])
            row.known = len(tokens)
            row.done = min(row.done, row.known - 1)
            self._note_filled(row)
            if row.lag <= LAG and row.known + most <= self._context:
                offers[id] = Proposal((UNKNOWN,) * most, row.share.estimate(self._shared.estimate()))
        return offers

    def _learn(self, row: DraftRow, tokens: Sequence[int]) -> None:
        for drafted, drawn in zip(row.draft, tokens[row.known :], strict=False):
            self._shared.learn(drafted == drawn)
            row.share.learn(drafted == drawn)
            if drafted != drawn:
                break
        if not row.draft:
            row.share.fade()
        row.draft, row.distributions = (), []

    # -- rows and their blocks ---------------------------------------------------------------------------------------

    def _apply(self, plan: StepPlan) -> None:
        """Rows come and go, and their tables grow, as the plan says."""
        for id in plan.gone:
            gone = self._rows.pop(id, None)
            if gone is not None:
                self._sampler.drop(gone.row.slot)
        starts = {work.id: work.start for work in plan.work} if plan.new else {}
        new = tuple([self._own(init) for init in plan.new if init.params.pooling is None])
        grown = [work for work in plan.work if work.blocks and work.id in self._rows]
        self._batch.apply(StepPlan(plan.step, new, gone=plan.gone))
        for init in new:
            row, size = self._batch.by_id[init.id], self._limits.block_size
            blocks, shared = init.blocks[0], starts.get(init.id, 0) // size
            self._filled.difference_update(blocks[shared:])
            filled = next((at for at in range(shared) if blocks[at] not in self._filled), shared)
            added = self._rows[init.id] = DraftRow(row, filled, size)
            self._sampler.add(row.slot, added.state)
        for work in grown:
            self._filled.difference_update(work.blocks[self._group])
        more = [Work(one.id, 0, 0, blocks=self._everywhere(one.blocks[self._group])) for one in grown]
        self._batch.apply(StepPlan(plan.step, work=tuple(more)))

    def _own(self, init: RowInit) -> RowInit:
        """The row as it is here: nothing that depends on what was drawn before, for drafts may be taken back."""
        blocks = self._everywhere(init.blocks[self._group])
        return msgspec.structs.replace(init, params=memoryless(init.params), adapter="", blocks=blocks)

    def _everywhere(self, blocks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return (blocks,) * len(self._limits.blocks)

    def _note_filled(self, row: DraftRow) -> None:
        full, blocks = row.done // self._limits.block_size, row.row.blocks[0]
        if full > row.filled:
            self._filled.update(blocks[row.filled : full])
            row.filled = full

    # -- computing ---------------------------------------------------------------------------------------------------

    def _first_drafts(self, wanted: dict[str, int]) -> list[Work]:
        """Of each row that drafts, what it does not know yet, the last token included."""
        rows = [(id, self._rows[id]) for id in wanted]
        return [Work(id, row.done, row.lag, logits=1, sample=True) for id, row in rows]

    def _catching_up(self, plan: StepPlan, wanted: dict[str, int]) -> list[Work]:
        """Of rows that do not draft, what the large model has computed, or does now."""
        if not plan.keep_up:
            return []
        works = []
        left = max(AT_ONCE, sum([work.count for work in plan.work if not work.decode]))
        for work in plan.work:
            row = self._rows.get(work.id)
            if row is None or work.id in wanted:
                continue
            end = min(work.start + work.count - len(work.draft), self._context)
            count = min(end - row.done, left)
            if count > (LAG // 2 if work.decode else 0):  # decodes are followed a piece at a time
                works.append(Work(work.id, row.done, count))
                left -= count
        return works

    def _compute(self, works: list[Work], wanted: dict[str, int]) -> None:
        """One pass: rows that sample say one more draft each."""
        if not works:
            return
        layout = self._batch.lay_out(works)
        logits = self._program.run(layout.batch)
        for work in works:
            row = self._rows[work.id]
            row.done = work.start + work.count
            if work.id not in wanted:
                self._note_filled(row)
        saying = [number for number, work in enumerate(works) if work.sample]
        if saying:
            slots, last, positions = layout.slots[saying], layout.last[saying], layout.batch.kv_len[saying]
            rows = [self._rows[works[number].id] for number in saying]
            self._say(rows, logits, slots, last, positions)

    def _say(
        self, rows: Sequence[DraftRow], logits: AnyLogits, slots: np.ndarray, last: np.ndarray, positions: np.ndarray
    ) -> None:
        if self._independent:
            tokens = [
                self._drawn_apart(row, logits, number, position)
                for row, number, position in zip(rows, last.tolist(), positions.tolist(), strict=True)
            ]
        else:
            tokens = self._sampler.draw(logits, slots, last, positions).tokens
        for row, token, position in zip(rows, tokens, positions.tolist(), strict=True):
            row.draft = (*row.draft, max(token, 0))  # below 0: its logits are no numbers; any draft will do
            row.row.put(position, (row.draft[-1],))

    def _drawn_apart(self, row: DraftRow, logits: AnyLogits, number: int, position: int) -> int:
        """A draft by noise that verification does not use, whose distribution is kept."""
        raw = self._backend.row(logits, number)
        try:
            q = distribution(raw, row.state, position)
        except RowFailure:
            q = np.full(len(raw), 1.0 / len(raw))
        row.distributions.append(q)
        key = {"seed": row.state.seed, "choice": row.state.choice}
        return int(race(q, dense_uniforms(len(q), position=position, purpose=DRAFT, **key)))

    def _proposal(self, row: DraftRow) -> Proposal:
        odds = row.share.estimate(self._shared.estimate())
        return Proposal(row.draft, odds, np.stack(row.distributions) if row.distributions else None)


def draft_limits(limits: Capabilities, group: int, groups: int) -> Capabilities:
    """What a small model with so many KV groups is to hold beside a large one whose limits these are."""
    most = pass_tokens(limits.max_tokens_per_step, min(limits.max_rows, limits.max_drafts))
    blocks = (limits.blocks[group],) * groups
    return msgspec.structs.replace(limits, blocks=blocks, windows=(None,) * groups, max_tokens_per_step=most)


def pass_tokens(step_tokens: int, rows: int) -> int:
    """The most that a small model computes at once beside a large one's steps, where so many rows may draft."""
    return max(AT_ONCE, step_tokens) + LAG * rows


def memoryless(params: SamplingParams) -> SamplingParams:
    """Of sampling parameters those that do not ask what was drawn before."""
    return SamplingParams(
        temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, seed=params.seed
    )
