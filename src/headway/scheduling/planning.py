"""One step while it is planned. A policy runs these passes in its order:

    decodes()  rows that have one known token left to compute: the next token of each
    prompts()  rows that have more, running or waiting: shortest first (see `prompts.py`)
    chunks()   running rows that have more, in their order: the next piece of a prompt, or of what was preempted
    admit()    waiting rows, in their order: take the cached prefix, then the first chunk

That is all of continuous batching, chunked prefill, prefix reuse, speculation and recompute: each pass only lets
`computed` catch up with `tokens + draft`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headway.core.step import BlockCopy, BlockIds, RowInit, StepPlan, StepShape, Work
from headway.scheduling.admission import Admission
from headway.scheduling.budget import Budget, StepTimeModel, largest_chunk
from headway.scheduling.drafting import Drafting
from headway.scheduling.pace import Pace, kind_of
from headway.scheduling.row import Row
from headway.scheduling.shape import ShapeBuilder
from headway.scheduling.state import State

# Why a waiting request was not admitted.
NO_ROWS = "rows"  # the executor holds as many as it can
NO_BUDGET = "budget"  # the step is full
NO_BLOCKS = "blocks"  # its tokens do not fit beside what running rows still need
PREFIX = "prefix"  # a row of this step computes most of its prompt; it waits for that to be shared
PREEMPTING = "preempting"  # blocks were taken back in this very step
BY_POLICY = "policy"  # the policy did not ask


class Step:
    """The plan in the making.

    Attributes:
        state: whose step it is. now: when it is planned, ps.
        admission: who may come in.
        left: new tokens that chunks may still take.
        work, rows: what is planned so far, and whose it is.
        partial: running rows that `decodes` passed over: they have more than one token left.
        copied: rows admitted with a block copied.
        admitted: how many rows were.
    """

    def __init__(
        self,
        state: State,
        budget: Budget,
        model: StepTimeModel | None,
        shaped: bool,
        now: int,
        pace: Pace,
        headroom: bool = True,
        drafting: Drafting | None = None,
    ) -> None:
        limits = state.limits
        self.state = state
        self.admission = Admission(state, headroom)
        self._budget = budget
        self._model = model
        self.now = now
        self._drafting = drafting
        self._pace = pace
        self.shape = ShapeBuilder(limits.windows, pace.skew) if shaped or model else None
        self._most = min(limits.max_tokens_per_step, budget.tokens or limits.max_tokens_per_step)
        self.left = self._most
        self._prompt_logits = limits.max_prompt_logits or limits.max_tokens_per_step
        self.work: list[Work] = []
        self.rows: list[Row] = []
        self.partial: list[Row] = []
        self.copied: list[Row] = []
        self.admitted = 0
        self._new: list[RowInit] = []
        self._copies: list[BlockCopy] = []
        self._reasons: dict[int, str] = {}  # why rows were not admitted, by their number
        self._otherwise = BY_POLICY
        self._preempted = False
        self._tokens = 0
        self._decodes = 0
        self._chunks = 0
        self._deepest = 0  # where the deepest of them begins
        self._opened = False  # the pass for prompts has begun
        self._alone = 0.0  # milliseconds of the decodes, as the model says
        self._base = 0.0  # and as steps like this one were lately
        self._until: float | None = None  # milliseconds at which the step should end; None = no limit
        self._stretched = 0.0  # as the model says, up to which it may last, however slow the machine

    @property
    def running(self) -> int:
        """Rows running, planned or not."""
        return len(self.state.running)

    @property
    def blocked(self) -> str:
        """Why the first waiting request has to wait; "" if none does."""
        first = self.state.queue.first()
        if first is None:
            return ""
        if self._preempted:  # even where the policy has admitted already: the plan's shape will not last
            return PREEMPTING
        return self._reasons.get(first.number, self._otherwise)

    def asked(self) -> None:
        """Every waiting row was looked at, as far as there was room for any."""
        self._otherwise = NO_ROWS if self.running >= self.state.limits.max_rows else NO_BUDGET

    def decodes(self) -> None:
        """Every row with one known token left computes it, and its drafts as far as the step has room for them.

        A row that needs a block and finds none takes the blocks of the last running row. That one is not planned
        yet: rows are visited in the same order, best first.
        """
        running = self.state.running
        grows = self.state.limits.long_after is not None
        if self.state.limits.max_drafts:
            self._cut_drafts()
        spare = self.left - len(running)  # tokens for drafts, once every row has its one
        starts: list[int] = []  # of rows that are just to go on, as nearly all are
        index = 0
        while index < len(running):
            row = running[index]
            index += 1
            request = row.request
            start = request.computed + request.pending
            plain = not (request.draft or row.wants_prompt_logprobs or request.params.pooling)
            if plain and row.held and start < row.table.capacity and start + 1 == len(request.tokens) and not grows:
                request.pending += 1
                starts.append(start)
                self.work.append(Work(request.id, start, 1, (), (), 1, True))
                self.rows.append(row)
                continue
            todo = request.todo
            if todo != 1:
                if todo:
                    self.partial.append(row)
                continue
            if grows and self.state.outgrown(row):
                self.state.preempt(row, self.now)
                self._preempted = True
                index -= 1
                continue
            draft = self._draft(row, spare) if request.draft else ()
            spare -= len(draft)
            end = start + 1 + len(draft)
            blocks = self._grow_or_preempt(row, end) if end > row.table.capacity else ()
            if blocks is None:  # it was the last one itself
                break
            self._plan(row, 1 + len(draft), draft, blocks)
            self._decodes += 1
        self._count_decodes(starts)

    def _count_decodes(self, starts: list[int]) -> None:
        """What rows that compute one token each, from these positions on, take of the step."""
        self._decodes += len(starts)
        self.left -= len(starts)
        self._tokens += len(starts)
        if self.shape is not None:
            self.shape.add_decodes(starts)

    def chunks(self) -> None:
        """Running rows with more than one known token left get the next chunk, in order, while the budget lasts."""
        self.open()
        for row in self.state.running:
            if self.left <= 0:
                return
            if row.request.todo > 1:
                self.chunk(row)

    def admit(self, whole_batch: bool = False) -> None:
        """Admit waiting rows, in order, while rows, blocks and budget allow, each with its first chunk.

        whole_batch: form a batch: admit as many as there is place for, even beyond this step's budget.
        """
        self.open()
        for row in list(self.state.queue):
            if self.admit_row(row, whole_batch=whole_batch) not in ("", PREFIX):
                return

    def make_room(self) -> None:
        """Take blocks back from running rows of a worse priority, the last first, if that lets the first waiting row
        in. Call it first: none of them may be planned already."""
        row, running = self.state.queue.first(), self.state.running
        if row is None or self.state.flights:
            return
        worse = [one for one in running if one.request.priority > row.request.priority and not one.strict]
        if not worse or not self.admission.could_fit(row, worse):
            return
        while worse and not (self.admission.has_row(row) and self.admission.fits(row, self.admission.prefix(row)[0])):
            self.state.preempt(worse.pop(), self.now)
            self.admission = self.admission.anew()

    def seconds_of(self, work: Work) -> float:
        """Predicted seconds of one row's work, as if it were alone."""
        assert self._model is not None, "a policy that predicts has a model"
        builder = ShapeBuilder(self.state.limits.windows)
        builder.add(work.start, work.count, work.logits, len(work.draft))
        return self._model.predict(builder.build())

    def seconds_of_prompt(self, row: Row) -> float:
        """Predicted seconds of all that a row has to compute before its next token, as if it were alone."""
        start = row.request.planned if row in self.partial else len(row.request.tokens) - self.admission.remaining(row)
        rest = len(row.request.tokens) - start
        more = -(-rest // self._most) - 1  # steps that it takes beyond one
        return self.seconds_of(Work("", start, rest, logits=1)) + more * self.seconds_of(Work("", 0, 1))

    def seconds_by_tenant(self) -> dict[str, float]:
        """Predicted seconds of what is planned so far, each tenant's as if it were alone."""
        assert self._model is not None, "a policy that predicts has a model"
        builders: dict[str, ShapeBuilder] = {}
        for row, work in zip(self.rows, self.work, strict=True):
            builder = builders.setdefault(row.request.tenant, ShapeBuilder(self.state.limits.windows))
            builder.add(work.start, work.count, work.logits, len(work.draft))
        return {tenant: self._model.predict(builder.build()) for tenant, builder in builders.items()}

    def open(self) -> None:
        """Find out what the decodes leave to prompts: never nothing, in tokens and in time. Idempotent."""
        if self._opened:
            return
        self._opened = True
        room = self.state.limits.max_tokens_per_step - self._tokens
        self.left = min(room, max(self._most - self._tokens, round(self._most * self._budget.least), 1))
        if self._model is None or self.shape is None or self._budget.milliseconds is None:
            return
        self._alone = 1e3 * self._model.predict(self.shape.build()) if self._decodes else 0.0
        self._base = self._alone * self._pace.slowness(kind_of(0, self._decodes > 0))
        self._until, self._stretched = self._budget.firm(self._base), self._budget.stretch * self._alone

    @contextmanager
    def sparing(self, tokens: int, part: int) -> Iterator[None]:
        """Plan with `tokens` fewer, and without one part in `part` of the time."""
        left, until, stretched, used = self.left, self._until, self._stretched, self._tokens
        self.left -= tokens
        if until is not None:
            self._until = until - (until - self._base) / part
            self._stretched = stretched - (stretched - self._alone) / part
        yield
        self.left = left - (self._tokens - used)
        self._until, self._stretched = until, stretched

    def chunk(self, row: Row) -> None:
        """Plan the next chunk of a running row, as large as budget, blocks and time allow; possibly none."""
        request = row.request
        count, timed_out = self._fitting(row, request.planned, min(request.todo, row.table.room() - request.planned))
        self.admission.promise_to(row, -1)
        self._plan_chunk(row, count, timed_out)

    def admit_row(self, row: Row, *, whole_batch: bool = False, partly: bool = True) -> str:
        """Admit a waiting row with its first chunk -> why not; "" if it was.

        Args:
            whole_batch: even if this step computes nothing of it.
            partly: even if this step does not compute all of it.
        """
        self._reasons[row.number] = reason = self._admit(row, whole_batch, partly)
        return reason

    def _admit(self, row: Row, whole_batch: bool, partly: bool) -> str:
        admission = self.admission
        known = self._reasons.get(row.number)
        if known in (NO_BLOCKS, PREFIX):  # for the whole step
            return known
        if self._preempted:
            return PREEMPTING
        if not admission.has_row(row):
            return NO_ROWS
        if self.left <= 0 and not whole_batch:
            return NO_BUDGET
        hit, fork = admission.prefix(row)
        if not admission.fits(row, hit):
            return NO_BLOCKS
        start = admission.start(row, hit, fork)
        rest = len(row.request.tokens) - start
        count, timed_out = self._fitting(row, start, rest)
        if not whole_batch and not fork:
            common = admission.coming(row, hit, zip(self.rows, self.work, strict=True), count)
            if common:
                admission.share(row, common)
                return PREFIX
        if (not count and not whole_batch) or (count < rest and not partly):
            return NO_BUDGET
        copies = self.state.admit(row, hit, fork, self.now)
        self._copies += copies
        if copies:
            self.copied.append(row)
        self.admitted += 1
        admission.admitted(row)
        self._plan_chunk(row, count, timed_out)
        return ""

    def finish(self, number: int) -> tuple[StepPlan, StepShape | None]:
        """The plan, and its shape if anyone wants to know. Empties the list of rows the executor must drop."""
        gone = tuple(self.state.gone)
        self.state.gone.clear()
        predicted = shape = None
        if self.shape is not None:
            self.shape.copies = len(self._copies)
            shape = self.shape.build()
            if self._model is not None and self.work:
                predicted = self._model.predict(shape)
        plan = StepPlan(number, tuple(self._new), tuple(self.work), gone, tuple(self._copies), predicted, self._keep_up)
        return plan, shape

    @property
    def _keep_up(self) -> bool:
        """Whether a draft model should follow the rows there are."""
        most = self.state.limits.max_drafts
        if not most or self._drafting is None or not self._drafting.priced or not self.running:
            return True
        cached = sum([row.request.computed for row in self.state.running])
        return self._drafting.pays(self.running, cached / self.running, most)

    def _cut_drafts(self) -> None:
        """Keep of all drafts those that are worth their time."""
        decoding = [row for row in self.state.running if row.request.todo == 1]
        drafted = [row for row in decoding if row.request.draft]
        if not drafted or self._drafting is None:
            return
        most = min(self.left - self.running, self.state.limits.max_drafts)
        lengths = self._drafting.lengths(
            [(len(row.request.draft), row.request.odds) for row in drafted],
            len(decoding),
            sum([row.request.computed for row in decoding]) / len(decoding),
            most,
            len(decoding) < self.running or len(self.state.queue) > 0,
        )
        for row, length in zip(drafted, lengths, strict=True):
            del row.request.draft[length:]

    @property
    def undrafted(self) -> float | None:
        """Seconds that a step of decodes is expected to take without its drafts; None if it has none or something else
        besides, or nobody knows."""
        drafts = sum([len(work.draft) for work in self.work]) if self.state.limits.max_drafts else 0
        if not drafts or self._drafting is None or self.shape is None or not all(work.decode for work in self.work):
            return None
        return self._drafting.undrafted(self.shape.build(), len(self.work), drafts)

    def _draft(self, row: Row, spare: int) -> tuple[int, ...]:
        """The drafts to verify: as many as the step has room for, leaving every running row the block it may need."""
        request = row.request
        room = row.table.room(keep=len(self.state.running)) - request.computed - 1
        if self.state.limits.long_after is not None and not row.table.long:  # what follows is computed anew from there
            room = min(room, self.state.limits.long_after - len(request.tokens))
        del request.draft[max(0, min(spare, room)) :]
        return tuple(request.draft)

    def _fitting(self, row: Row, start: int, most: int) -> tuple[int, bool]:
        """How many of a row's tokens from `start` on, at most `most`, fit into the step, and whether they use up its
        time. The first chunk of a step always moves."""
        count = min(most, self.left)
        if row.wants_prompt_logprobs:
            if start < row.reported:  # computed again after a preemption, but reported only once
                count = min(count, row.reported - start)
            else:
                count = min(count, self._prompt_logits)
        if count <= 0:
            return 0, False
        if self._until is None:
            return count, False
        assert self.shape is not None and self._model is not None
        kind = kind_of(max(self._deepest, start), self._decodes > 0)
        slow, usual = self._pace.slowness(kind), self._pace.usual(kind)
        stretched = max(self._stretched * usual / slow, (self._stretched + self._alone) / 2)
        longest = max(self._until / slow, stretched)
        fits = largest_chunk(self.shape, start, count, self._model, longest)
        return max(fits, 0 if self._chunks else 1), fits < count

    def _plan_chunk(self, row: Row, count: int, timed_out: bool) -> None:
        if count > 0:
            blocks = row.table.grow(row.request.planned + count)
            assert blocks is not None, "a chunk is cut to the room there is"
            self._deepest = max(self._deepest, row.request.planned)
            self._plan(row, count, (), blocks)
            self._chunks += 1
        self.admission.promise_to(row)
        if timed_out:
            self.left = 0

    def _plan(self, row: Row, count: int, draft: tuple[int, ...], blocks: BlockIds) -> None:
        """Add a row's work. An executor that does not hold the row gets all of it first."""
        request = row.request
        start = request.computed + request.pending
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
        pool = request.params.pooling is not None
        sample = not pool and start + count >= len(request.tokens) + len(draft)
        logits = 1 + len(draft) if sample else 0
        report = row.wants_prompt_logprobs and start >= row.reported
        if report:
            logits = count
            self._prompt_logits -= count
            row.report(start + count)
        request.pending += count
        self.work.append(Work(request.id, start, count, draft, blocks, logits, sample, report, pool))
        self.rows.append(row)
        self.left -= count
        self._tokens += count
        if self.shape is not None:
            self.shape.add(start, count, logits, len(draft))

    def _grow_or_preempt(self, row: Row, end: int) -> BlockIds | None:
        """Blocks up to position `end`, from the last running rows if need be; None if the row itself had to yield."""
        while (blocks := row.table.grow(end)) is None:
            victim = self.state.running[-1]
            self.state.preempt(victim, self.now)
            self._preempted = True
            if victim is row:
                return None
        return blocks
