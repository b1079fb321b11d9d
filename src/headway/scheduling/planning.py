"""One step while it is planned. Three passes, which a policy runs in its order:

    decodes()  rows that have one known token left to compute: the next token of each
    chunks()   rows that have more: the next piece of a prompt, or of what a preemption threw away
    admit()    waiting rows: take the cached prefix, then the first chunk

That is all of continuous batching, chunked prefill, prefix reuse, speculation and recompute: each pass only lets
`computed` catch up with `tokens + draft`.
"""

from __future__ import annotations

from headway.cache.hashing import agreeing
from headway.cache.kv import Hit
from headway.core.step import BlockCopy, BlockIds, Capabilities, RowInit, StepPlan, Work
from headway.scheduling.budget import Budget, StepTimeModel, largest_chunk
from headway.scheduling.row import Place, Row
from headway.scheduling.shape import ShapeBuilder
from headway.scheduling.state import State

# Why the first waiting request was not admitted.
NO_ROWS = "rows"  # the executor holds as many as it can
NO_BUDGET = "budget"  # the step is full
NO_BLOCKS = "blocks"  # its tokens do not fit beside what running rows still need
TWIN = "twin"  # a running row is computing most of its prompt just now; it waits for that to be shared
PREEMPTING = "preempting"  # blocks were taken back in this very step
BY_POLICY = "policy"  # the policy did not ask


class Step:
    """The plan in the making.

    Attributes:
        left: new tokens that chunks may still take.
        work, rows: what is planned so far, and whose it is.
        blocked: why the first waiting request, if there is one, has to wait.
    """

    def __init__(
        self, state: State, limits: Capabilities, budget: Budget, model: StepTimeModel | None, shaped: bool, now: int
    ) -> None:
        self._state = state
        self._limits = limits
        self._budget = budget
        self._model = model
        self._now = now
        self.shape = ShapeBuilder(limits.windows) if shaped or model else None
        self.left = min(limits.max_tokens_per_step, budget.tokens or limits.max_tokens_per_step)
        self._prompt_logits = limits.max_prompt_logits or limits.max_tokens_per_step
        self.work: list[Work] = []
        self.rows: list[Row] = []
        self.blocked = BY_POLICY
        self._new: list[RowInit] = []
        self._copies: list[BlockCopy] = []
        self._preempted = False
        self._chunks = 0
        self._decodes = 0

    @property
    def running(self) -> int:
        """Rows running, planned or not."""
        return len(self._state.running)

    def decodes(self) -> None:
        """Every row with one known token left computes it, and its drafts as far as the step has room for them.

        A row that needs a block and finds none takes the blocks of the last running row. That one is not planned
        yet: rows are visited in the same order, best first.
        """
        running = self._state.running
        spare = self.left - len(running)  # tokens for drafts, once every row has its one
        index = 0
        while index < len(running):
            row = running[index]
            index += 1
            request = row.request
            start = request.computed
            if len(request.tokens) - start != 1:
                continue
            draft = self._draft(row, spare) if request.draft else ()
            spare -= len(draft)
            end = start + 1 + len(draft)
            blocks = self._grow_or_preempt(row, end) if end > row.table.capacity else ()
            if blocks is None:  # it was the last one itself
                return
            self._plan(row, 1 + len(draft), draft, blocks)
            self._decodes += 1

    def chunks(self) -> None:
        """Running rows with more than one known token left get the next chunk, in order, while the budget lasts."""
        for row in self._state.running:
            if self.left <= 0:
                return
            if len(row.request.tokens) - row.request.computed > 1:
                self._chunk(row)

    def admit(self, whole_batch: bool = False) -> None:
        """Admit waiting rows, in order, while rows, blocks and budget allow, each with its first chunk.

        whole_batch: form a batch: admit as many as there is place for, even beyond this step's budget.
        """
        state = self._state
        owed: list[int] = []
        twins: list[Row] = []  # each keeps a place: a row, and its blocks among those owed
        while (row := state.queue.first()) is not None:
            if self._preempted:
                self.blocked = PREEMPTING
            elif len(state.running) + len(twins) >= self._limits.max_rows:
                self.blocked = NO_ROWS
            elif self.left <= 0 and not whole_batch:
                self.blocked = NO_BUDGET
            else:
                owed = owed or self._owed_to_all()
                hit, parent = self._prefix(row)  # before anything is counted
                if self._fits(row, hit, owed):
                    if not whole_batch and parent is None and self._is_coming(row, hit):
                        state.queue.remove(row)
                        twins.append(row)
                    else:
                        self._copies += state.admit(row, hit, parent, self._now)
                        self._chunk(row)
                    for group in range(len(owed)):
                        owed[group] += self._owed(row, group)
                    continue
                self.blocked = NO_BLOCKS
            break
        for row in twins:
            state.queue.push(row)
            self.blocked = TWIN

    def finish(self, number: int) -> StepPlan:
        """The plan. Empties the list of rows the executor must drop."""
        gone = tuple(self._state.gone)
        self._state.gone.clear()
        predicted = None
        if self.shape is not None:
            self.shape.copies = len(self._copies)
            if self._model is not None and self.work:
                predicted = self._model.predict(self.shape.build())
        return StepPlan(number, tuple(self._new), tuple(self.work), gone, tuple(self._copies), predicted)

    def _draft(self, row: Row, spare: int) -> tuple[int, ...]:
        """The drafts to verify: as many as the step has room for, leaving every running row the block it may need."""
        request = row.request
        room = row.table.room(keep=len(self._state.running)) - request.computed - 1
        del request.draft[max(0, min(spare, room)) :]
        return tuple(request.draft)

    def _chunk(self, row: Row) -> None:
        """The next chunk of a row, as large as budget, blocks and time allow; possibly none."""
        request = row.request
        start = request.computed
        count = min(len(request.tokens) - start, self.left, row.table.room() - start)
        if row.wants_prompt_logprobs:
            if start < row.reported:  # computed again after a preemption, but reported only once
                count = min(count, row.reported - start)
            else:
                count = min(count, self._prompt_logits)
        if self._model is not None and self._budget.milliseconds is not None and self._decodes and count > 0:
            count = self._cut(start, count)
        if count <= 0:
            return
        blocks = row.table.grow(start + count)
        assert blocks is not None, "a chunk is cut to the room there is"
        self._plan(row, count, (), blocks)
        self._chunks += 1

    def _cut(self, start: int, count: int) -> int:
        """Shorten a chunk so that running decodes keep the time target. The first chunk of a step always moves."""
        assert self.shape is not None and self._model is not None and self._budget.milliseconds is not None
        fits = largest_chunk(self.shape, start, count, self._model, self._budget.milliseconds)
        if fits < count:
            fits = max(fits, 0 if self._chunks else min(count, self._budget.min_chunk))
            self.left = fits  # the time is used up
        return fits

    def _plan(self, row: Row, count: int, draft: tuple[int, ...], blocks: BlockIds) -> None:
        """Add a row's work. An executor that does not hold the row is told all of it first."""
        request = row.request
        start = request.computed
        if not row.held:
            row.held = True
            blocks = ()  # the RowInit names them all
            self._new.append(
                RowInit(
                    request.id,
                    tuple(request.tokens),
                    request.prompt_len,
                    request.params,
                    request.choice,
                    tuple(sorted(request.stop_ids)),
                    row.table.ids(),
                    request.adapter,
                )
            )
        sample = start + count == len(request.tokens) + len(draft)
        logits = 1 + len(draft) if sample else 0
        report = start >= row.reported and row.wants_prompt_logprobs
        if report:
            logits = count
            self._prompt_logits -= count
            row.reported = min(start + count, request.prompt_len - 1)
        self.work.append(Work(request.id, start, count, draft, blocks, logits, sample, report))
        self.rows.append(row)
        self.left -= count
        if self.shape is not None:
            self.shape.add(start, count, logits)

    def _grow_or_preempt(self, row: Row, end: int) -> BlockIds | None:
        """Blocks up to position `end`, from the last running rows if need be; None if the row itself had to yield."""
        while (blocks := row.table.grow(end)) is None:
            victim = self._state.running[-1]
            self._state.preempt(victim, self._now)
            self._preempted = True
            self.blocked = PREEMPTING  # even where the policy has admitted already: the plan's shape will not last
            if victim is row:
                return None
        return blocks

    def _prefix(self, row: Row) -> tuple[Hit, Row | None]:
        """What a waiting row need not compute, and the parent it is forked from, if it is."""
        request = row.request
        parent = self._state.rows.get(request.parent) if request.parent and not request.generated else None
        if parent is not None and parent.place is Place.RUNNING and parent.request.computed >= request.prompt_len:
            hit = parent.table.forkable(request.prompt_len - 1)
            if hit is not None:
                return hit, parent
        if row.wants_prompt_logprobs:
            return self._state.cache.lookup((), ()), None
        return row.table.lookup(request.tokens), None

    def _is_coming(self, row: Row, hit: Hit) -> bool:
        """Running rows are about to compute at least half of what a waiting row would have to: better to wait, a few
        steps at most, and share it. Should such a row end or yield before, nothing is coming any more."""
        if row.wants_prompt_logprobs:
            return False
        size = self._state.cache.block_size
        tokens = row.request.tokens
        names = row.table.name_blocks(tokens, (len(tokens) - 1) // size)
        shared = hit.length
        for other in self._state.running:
            full = len(other.request.tokens) // size
            if other.table.sealed < full:
                common = agreeing(names, other.table.name_blocks(other.request.tokens, full))
                if common > other.table.sealed:
                    shared = max(shared, common)
        return 2 * (shared - hit.length) * size >= len(tokens) - hit.length * size

    def _fits(self, row: Row, hit: Hit, owed: list[int]) -> bool:
        """Optimistic admission: the row's known tokens (its worst case, if strict) fit beside what running rows are
        still owed, and one more block for each of them and for itself. Alone it always fits: `add` made sure."""
        state = self._state
        headroom = len(state.running) + 1 if state.running else 0
        for group, pool in enumerate(state.cache.pools):
            shared = hit.blocks[group][hit.first[group] :]
            needed = state.cache.holding(group, self._claim(row)) - len(shared)
            revived = sum(pool.refs[block] == 0 for block in shared)  # available no more once they are shared
            if pool.available - revived - owed[group] - headroom < needed:
                return False
        return True

    def _owed_to_all(self) -> list[int]:
        """Per group, blocks promised to running rows. O(rows), so only asked for when someone may be admitted."""
        groups = range(len(self._state.cache.pools))
        return [sum(self._owed(row, group) for row in self._state.running) for group in groups]

    def _owed(self, row: Row, group: int) -> int:
        """Blocks promised to a running row at its admission that it has not taken yet."""
        if len(row.request.tokens) - row.request.computed == 1 and not row.strict:
            return 0
        return max(0, self._state.cache.holding(group, self._claim(row)) - row.table.held(group))

    @staticmethod
    def _claim(row: Row) -> int:
        """Tokens a row must have place for: the known ones, or all there can ever be (the last is not cached)."""
        return row.request.max_len - 1 if row.strict else len(row.request.tokens)
