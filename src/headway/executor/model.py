"""The executor that runs a real model: rows, one backend program per step, the sampler."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from msgspec.structs import replace

from headway.core.step import Capabilities, RowInit, Seconds, StepPlan, StepResult, Work
from headway.executor.adapters import AdapterTable
from headway.executor.batch import BatchRows, StepLayout
from headway.executor.grammars import Grammars
from headway.ops.protocol import Backend, CacheLayout, Forward, Program
from headway.sampling.grammar import GrammarState
from headway.sampling.operations import AnyLogits
from headway.sampling.rows import RowFailure, RowState
from headway.sampling.sampler import Sampler
from headway.sampling.verifier import UNDRAFTED, Drafted, Verifier
from headway.shape.model import KVGroup
from headway.speculation.proposer import LONGEST, UNKNOWN, Proposal, Proposer


class ModelExecutor:
    """Computes plans on a backend.

    Args:
        backend: holds the prepared weights.
        forward: the model's forward pass.
        groups: its KV groups.
        limits: what it promises; the cache is allocated for it.
        adapters: what rows may have; None = no adapters.
        grammars: what rows may be bound to; None = no grammars.
        proposer: who proposes drafts; None = nobody.
        mode: how they are verified, see `sampling.verify`.
        score: classification head of rows that are pooled to a score, float32 [labels, d]; None = there is none.
    """

    def __init__(
        self,
        backend: Backend,
        forward: Forward,
        groups: tuple[KVGroup, ...],
        limits: Capabilities,
        adapters: AdapterTable | None = None,
        grammars: Grammars | None = None,
        proposer: Proposer | None = None,
        mode: str = "coupled",
        score: np.ndarray | None = None,
    ) -> None:
        self._backend = backend
        self._adapters = adapters
        self._grammars = grammars
        self._score = score
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="masks")  # starts with the first grammar
        self._limits = limits
        self._proposer = proposer
        self._mode = mode
        backend.allocate(CacheLayout(groups, limits.blocks, limits.block_size))
        self._program: Program | None = backend.compile(forward)
        self.reset()

    def capabilities(self) -> Capabilities:
        return self._limits

    def reset(self) -> None:
        """Forget all rows. The cache's content stays."""
        self._proposals: dict[str, Proposal] = {}  # the latest of each row: it may wait for a step
        if self._proposer is not None:
            self._proposer.reset()
        self._rows = BatchRows(self._limits, self._adapter_of)
        self._without_adapter: set[str] = set()  # rows whose adapter is not here
        self._sampler = Sampler(self._limits.max_rows, self._backend)
        self._verifier = Verifier(self._sampler, self._backend, self._mode)
        self._done: dict[int, StepResult] = {}

    def close(self) -> None:
        """Forget rows and program; idempotent. The backend is its owner's to close."""
        self.reset()
        self._aside.shutdown()
        self._program = None

    def submit(self, plan: StepPlan) -> int:
        """Compute the step now; steps are not overlapped yet."""
        self._done[plan.step] = self._run(plan)
        return plan.step

    def collect(self, ticket: int) -> StepResult:
        return self._done.pop(ticket)

    def _run(self, plan: StepPlan) -> StepResult:
        called = time.perf_counter()
        plan = self._with_drafts(plan)
        begin = time.perf_counter()
        self._apply(plan)
        if not plan.work:
            return StepResult(step=plan.step)
        layout = self._rows.lay_out(plan.work)
        prepared = time.perf_counter()
        assert self._program is not None, "the executor is closed"
        drawing = [slot for work, slot in zip(plan.work, layout.slots.tolist(), strict=True) if work.sample]
        bound = self._sampler.follows(drawing)
        ahead = self._aside.submit(self._sampler.prepare, bound) if bound else None
        logits = self._program.run(layout.batch)
        if ahead is not None:
            ahead.result()
        computed = time.perf_counter()
        result = self._emit(plan, logits, layout)
        ended = time.perf_counter()
        result.seconds = Seconds(prepared - begin, computed - prepared, ended - computed, draft=begin - called)
        return result

    def _with_drafts(self, plan: StepPlan) -> StepPlan:
        """The plan with the drafts that were only promised."""
        if self._proposer is None:
            return plan
        said = self._proposer.step(plan)
        if not said:
            return plan
        self._proposals |= said
        works = [replace(one, draft=said[one.id].tokens) if one.id in said else one for one in plan.work]
        return replace(plan, work=tuple(works))

    def _apply(self, plan: StepPlan) -> None:
        for gone in plan.gone:
            self._without_adapter.discard(gone)
            self._proposals.pop(gone, None)
            if gone in self._rows.by_id:
                self._sampler.drop(self._rows.by_id[gone].slot)
        self._rows.apply(plan)
        for init in plan.new:
            self._sampler.add(self._rows.by_id[init.id].slot, RowState(init, self._grammar_of(init)))
        for group in range(len(self._limits.blocks) if plan.copies else 0):
            pairs = [(copy.src, copy.dst) for copy in plan.copies if copy.group == group]
            if pairs:
                self._backend.copy_blocks(group, pairs)

    def _adapter_of(self, init: RowInit) -> int:
        number = self._adapters.number(init.adapter) if self._adapters is not None else 0 if not init.adapter else None
        if number is None:
            self._without_adapter.add(init.id)
        return number or 0

    def _grammar_of(self, init: RowInit) -> GrammarState | None:
        """The row's own place in its grammar."""
        if init.params.grammar is None:
            return None
        assert self._grammars is not None, "admission saw to it"
        return self._grammars.state(init.params.grammar)

    def _emit(self, plan: StepPlan, logits: AnyLogits, layout: StepLayout) -> StepResult:
        """Sample where the plan says so. The token drawn is at the position behind what is cached."""
        assert self._program is not None, "the executor is closed"
        result = StepResult(step=plan.step, experts=self._program.experts)
        works, slots, last, positions = plan.work, layout.slots, layout.last, layout.batch.kv_len
        for work in works if self._without_adapter else ():
            if work.id in self._without_adapter:
                result.failed[work.id] = f"its adapter {self._rows.by_id[work.id].init.adapter} is not loaded"
        self._report_prompts(works, logits, last, result)
        if any(work.pool for work in works):
            self._pool(works, self._program.pooled, result)
        drawing = [number for number, work in enumerate(works) if work.sample and work.id not in result.failed]
        if len(drawing) < len(works):
            works = tuple([works[number] for number in drawing])
            slots, last, positions = slots[drawing], last[drawing], positions[drawing]
        drawn = self._verifier.verify(logits, slots, last, positions, [self._drafted(work) for work in works])
        for work, tokens in zip(works, drawn.tokens, strict=True):
            if tokens:
                result.tokens[work.id] = tuple(tokens)
                self._rows.by_id[work.id].put(work.start + work.count - len(work.draft), tokens)
        for entry, reports in drawn.logprobs.items():
            result.logprobs[works[entry].id] = tuple(reports)
        for entry, sentence in drawn.failed.items():
            result.failed[works[entry].id] = sentence
        if self._proposer is not None:
            self._propose(self._proposer, result)
        return result

    def _drafted(self, work: Work) -> Drafted:
        """What a row proposed, as far as it is to be verified."""
        if not work.draft:
            return UNDRAFTED
        proposal = self._proposals.get(work.id)  # None if it was made before the executor broke
        q = None if proposal is None or proposal.q is None else proposal.q[: len(work.draft)]
        return Drafted(work.draft, q)

    def _propose(self, proposer: Proposer, result: StepResult) -> None:
        """Drafts for the next step, of every row that emitted something, as far as its grammar takes them."""
        rows = {id: self._rows.by_id[id] for id in result.tokens}
        proposals = proposer.propose([(id, row.tokens) for id, row in rows.items()], LONGEST)
        self._proposals |= proposals
        for id, proposal in proposals.items():
            promised = UNKNOWN in proposal.tokens  # nobody knows yet whether they fit
            count = len(proposal.tokens) if promised else self._sampler.state(rows[id].slot).fitting(proposal.tokens)
            if count:
                result.drafts[id], result.odds[id] = proposal.tokens[:count], proposal.odds

    def _pool(self, works: Sequence[Work], hidden: np.ndarray, result: StepResult) -> None:
        """Hidden states to the rows they are of, which are laid out in this order."""
        at = 0
        for work in works:
            row = self._rows.by_id[work.id]
            if row.pool is None:
                continue
            count = len(row.pool.positions(work.start, work.count))
            row.pool.take(hidden[at : at + count])
            at += count
            if work.start + work.count == row.init.prompt_len:
                vector = row.pool.outcome()
                if row.init.params.pooling == "score":
                    assert self._score is not None, "admission saw to it"
                    vector = self._score @ vector
                if np.isfinite(vector).all():
                    result.pooled[work.id] = vector.astype("<f4").tobytes()
                else:
                    result.failed[work.id] = "the model's hidden states are not finite; is the checkpoint damaged?"

    def _report_prompts(self, works: Sequence[Work], logits: AnyLogits, last: np.ndarray, result: StepResult) -> None:
        """Logprobs of the prompt tokens that follow the computed positions; the prompt's last one foretells none."""
        for number, work in enumerate(works):
            if not work.prompt_logprobs:
                continue
            row = self._rows.by_id[work.id]
            end, first = work.start + work.count, int(last[number]) - work.logits + 1  # in the row; in the logits
            following = row.tokens[end - work.logits + 1 : min(end + 1, row.init.prompt_len)]
            top = row.init.params.prompt_logprobs
            if top is None or not following:
                continue
            try:
                result.prompt_logprobs[work.id] = tuple(self._backend.logprobs(logits, first, following, top))
            except RowFailure as failure:
                result.failed[work.id] = str(failure)
