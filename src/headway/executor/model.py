"""The executor that runs a real model: rows, one backend program per step, the sampler."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from headway.core.step import Capabilities, Seconds, StepPlan, StepResult, Work
from headway.executor.batch import Rows
from headway.ops.protocol import Backend, CacheLayout, Forward
from headway.roofline.shape import KVGroup
from headway.sampling.logits import Logits
from headway.sampling.logprobs import token_logprobs
from headway.sampling.rows import RowFailure, RowState
from headway.sampling.sampler import Sampler


class ModelExecutor:
    """Computes plans on a backend.

    Args:
        backend: holds the prepared weights.
        forward: the model's forward pass.
        groups: its KV groups.
        limits: what it promises; the cache is allocated for it.
    """

    def __init__(self, backend: Backend, forward: Forward, groups: tuple[KVGroup, ...], limits: Capabilities) -> None:
        self._backend = backend
        self._limits = limits
        backend.allocate(CacheLayout(groups, limits.blocks, limits.block_size))
        self._program = backend.compile(forward)
        self.reset()

    def capabilities(self) -> Capabilities:
        return self._limits

    def reset(self) -> None:
        """Forget all rows. The cache's content stays."""
        self._rows = Rows(self._limits)
        self._sampler = Sampler(self._limits.max_rows, self._backend.draw)
        self._done: dict[int, StepResult] = {}

    def close(self) -> None:
        self.reset()

    def submit(self, plan: StepPlan) -> int:
        """Compute the step now; steps are not overlapped yet."""
        self._done[plan.step] = self._run(plan)
        return plan.step

    def collect(self, ticket: int) -> StepResult:
        return self._done.pop(ticket)

    def _run(self, plan: StepPlan) -> StepResult:
        begin = time.perf_counter()
        self._apply(plan)
        if not plan.work:
            return StepResult(step=plan.step)
        batch, slots = self._rows.batch(plan.work)
        prepared = time.perf_counter()
        logits = self._program.run(batch)
        computed = time.perf_counter()
        result = self._emit(plan, logits, slots, batch.kv_len)
        ended = time.perf_counter()
        result.seconds = Seconds(prepared - begin, computed - prepared, ended - computed)
        return result

    def _apply(self, plan: StepPlan) -> None:
        for gone in plan.gone:
            if gone in self._rows.slots:
                self._sampler.drop(self._rows.slots[gone])
        self._rows.apply(plan)
        for init in plan.new:
            self._sampler.add(self._rows.slots[init.id], RowState(init))
        for group in range(len(self._limits.blocks) if plan.copies else 0):
            pairs = [(copy.src, copy.dst) for copy in plan.copies if copy.group == group]
            if pairs:
                self._backend.copy_blocks(group, pairs)

    def _emit(self, plan: StepPlan, logits: Logits, slots: np.ndarray, ends: np.ndarray) -> StepResult:
        """Sample where the plan says so.

        Args:
            plan: the step.
            logits: of each work in turn, as many rows as it wants.
            slots: of each work.
            ends: int32 [work], position of the token that each would draw.
        """
        result = StepResult(step=plan.step)
        last = np.cumsum([work.logits for work in plan.work], dtype=np.int32) - 1  # each work's last logit row
        self._report_prompts(plan.work, logits, last, result)
        drawing = [number for number, work in enumerate(plan.work) if work.sample and work.id not in result.failed]
        if len(drawing) < len(plan.work):
            slots, last, ends = slots[drawing], last[drawing], ends[drawing]
        drawn = self._sampler.sample(logits, slots, last, ends)
        self._rows.tokens[slots, ends] = drawn.tokens
        ids = [plan.work[number].id for number in drawing]
        result.tokens = {id: (token,) for id, token in zip(ids, drawn.tokens, strict=True)}
        result.logprobs = {ids[entry]: (report,) for entry, report in drawn.logprobs.items()}
        for entry, sentence in drawn.failed.items():
            del result.tokens[ids[entry]]
            result.failed[ids[entry]] = sentence
        return result

    def _report_prompts(self, works: Sequence[Work], logits: Logits, last: np.ndarray, result: StepResult) -> None:
        """Logprobs of the prompt tokens that follow the computed positions; the prompt's last one foretells none."""
        for work, end in zip(works, last.tolist(), strict=True):
            if not work.prompt_logprobs:
                continue
            slot = self._rows.slots[work.id]
            init = self._rows.inits[slot]
            assert init is not None, "the plan names rows that exist"
            first = work.start + work.count - work.logits + 1  # position that the first logit row foretells
            following = self._rows.tokens[slot, first : min(work.start + work.count + 1, init.prompt_len)]
            top, row = init.params.prompt_logprobs, end - work.logits + 1
            if top is None or not len(following):
                continue
            try:
                reports = token_logprobs(logits.part(row, row + len(following)), following.tolist(), top)
                result.prompt_logprobs[work.id] = tuple(reports)
            except RowFailure as failure:
                result.failed[work.id] = str(failure)
