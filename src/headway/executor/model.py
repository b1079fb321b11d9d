"""The executor that runs a real model: rows, one backend program per step, the sampler."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from headway.core.step import Capabilities, Seconds, StepPlan, StepResult, Work
from headway.executor.batch import Row, Rows
from headway.ops.protocol import Backend, CacheLayout, Forward
from headway.roofline.shape import KVGroup
from headway.sampling.logprobs import token_logprobs
from headway.sampling.pipeline import sample
from headway.sampling.rows import RowFailure, RowState


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
        self._rows = Rows(len(self._limits.blocks), self._limits.block_size, self._limits.max_model_len)
        self._samplers: dict[str, RowState] = {}
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
        batch = self._rows.batch(plan.work)
        prepared = time.perf_counter()
        logits = self._program.run(batch)  # [logit_rows, vocab]
        computed = time.perf_counter()
        result = self._emit(plan, logits)
        ended = time.perf_counter()
        result.seconds = Seconds(prepared - begin, computed - prepared, ended - computed)
        return result

    def _apply(self, plan: StepPlan) -> None:
        self._rows.apply(plan)
        for gone in plan.gone:
            self._samplers.pop(gone, None)
        for init in plan.new:
            self._samplers[init.id] = RowState(init)
        for group in range(len(self._limits.blocks)):
            pairs = [(copy.src, copy.dst) for copy in plan.copies if copy.group == group]
            if pairs:
                self._backend.copy_blocks(group, pairs)

    def _emit(self, plan: StepPlan, logits: np.ndarray) -> StepResult:
        """Sample where the plan says so. A work's logit rows are `logits[end - work.logits : end]`."""
        result = StepResult(step=plan.step)
        ends = list(accumulate(work.logits for work in plan.work))
        for work, end in zip(plan.work, ends, strict=True):
            if work.prompt_logprobs:
                self._report_prompt(work, logits[end - work.logits : end], result)
        drawing = [
            (work, end - 1)
            for work, end in zip(plan.work, ends, strict=True)
            if work.sample and work.id not in result.failed
        ]
        rows = [self._samplers[work.id] for work, _ in drawing]
        positions = [work.start + work.count for work, _ in drawing]
        drawn = sample(_take(logits, [index for _, index in drawing]), rows, positions)
        for number, (work, _) in enumerate(drawing):
            if number in drawn.failed:
                result.failed[work.id] = drawn.failed[number]
                continue
            token, report = drawn.tokens[number], drawn.logprobs[number]
            self._rows.by_id[work.id].append((token,))
            result.tokens[work.id] = (token,)
            if report is not None:
                result.logprobs[work.id] = (report,)
        return result

    def _report_prompt(self, work: Work, logits: np.ndarray, result: StepResult) -> None:
        """Logprobs of the prompt tokens that follow the computed positions; the prompt's last one foretells none."""
        row: Row = self._rows.by_id[work.id]
        first = work.start + work.count - work.logits + 1  # position that the first logit row foretells
        following = row.tokens[first : min(work.start + work.count + 1, row.init.prompt_len)]
        top = row.init.params.prompt_logprobs
        if top is None or not len(following):
            return
        try:
            result.prompt_logprobs[work.id] = tuple(token_logprobs(logits[: len(following)], following.tolist(), top))
        except RowFailure as failure:
            result.failed[work.id] = str(failure)


def _take(logits: np.ndarray, indices: Sequence[int]) -> np.ndarray:
    """These rows; without a copy when it is all of them (every plain decode step)."""
    return logits if len(indices) == len(logits) else logits[list(indices)]
