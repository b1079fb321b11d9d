"""The first steps of an engine, before anybody asks: they have its buffers mapped, and tell how long its steps take.

Four kinds of step are enough for a model of step times that the scheduler can size its work with: a decode and a
chunk, each without a context and behind a long one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

from headway.core.request import SamplingParams
from headway.core.step import BlockCopy, Capabilities, RowInit, StepPlan, Work
from headway.executor.protocol import Executor
from headway.roofline.fixed import FixedCosts
from headway.scheduling.budget import Budget, StepTimeModel, largest_chunk
from headway.scheduling.shape import ShapeBuilder

CHUNK, SMALL_CHUNK, SLOW = 32, 16, 0.1  # tokens; the small one where a decode takes longer than SLOW seconds
CONTEXT = 1024  # tokens of the long context
TRIES = 2

SETTLE_SECONDS = 0.5
TOUCHED = 16  # blocks of each group that are written at once

DECODES = 3.0  # what a step may take beside decodes, in decode steps of one row
STRETCH = 2.0  # the same beside many decodes, in steps of these: there, prompts get as much time as they
LEAST_MS = 20.0  # a faster stream than fifty tokens a second helps nobody
_LABEL = "warm-up"


def measure_steps(executor: Executor) -> FixedCosts:
    """Run a few steps on an executor that holds no rows yet -> what its steps cost. Leaves none behind."""
    limits = executor.capabilities()
    steps = _Steps(executor, limits)
    context = min(CONTEXT, limits.max_model_len - CHUNK - 2, min(limits.blocks) * limits.block_size - CHUNK)
    decode = steps.seconds(0, 1)
    chunk = min(CHUNK if decode < SLOW else SMALL_CHUNK, limits.max_tokens_per_step)
    if context < chunk or chunk < 2:
        return FixedCosts(step=decode)
    prefill = steps.seconds(0, chunk)
    far_decode, far_prefill = steps.seconds(context, 1), steps.seconds(context, chunk)
    token = max(0.0, (prefill - decode) / (chunk - 1))
    pair = max(0.0, (far_prefill - prefill - far_decode + decode) / ((chunk - 1) * context))
    return FixedCosts(
        step=max(0.0, decode - token),
        token=token,
        pair=pair,
        kv_token=max(0.0, (far_decode - decode) / context - pair),
    )


@dataclass(frozen=True)
class Pacing:
    """How large steps are to be.

    Attributes:
        budget: in tokens, and in milliseconds if there is a model.
        model: predicts steps; None = nothing does.
        costs: what the first steps cost, if they were measured.
        text: the budget in words, for people.
    """

    budget: Budget
    model: StepTimeModel | None
    costs: FixedCosts | None
    text: str


def pace(
    executor: Executor,
    tokens: int,
    step_ms: float | None,
    known: StepTimeModel | None,
    measured: bool,
    streams: bool = True,
) -> Pacing:
    """Warm the executor up, and decide how large its steps are to be.

    Args:
        tokens: most new tokens of a step.
        step_ms: most milliseconds beside decodes, if somebody says.
        known: an estimate of step times; None = from the first steps.
        measured: whether to size steps by time although nobody says how long they may be.
        streams: whether somebody reads along, whom a long step would keep waiting; False = the largest steps, which do
            the most per second, unless `step_ms` says otherwise.
    """
    if step_ms is None and not measured:
        return Pacing(Budget(tokens=tokens), known, None, f"up to {tokens} tokens")
    costs = measure_steps(executor)
    decode = 1e3 * (costs.step + costs.token)
    if step_ms is None and not streams:
        return Pacing(Budget(tokens=tokens), known or costs, costs, f"up to {tokens} tokens")
    budget = usual_budget(tokens, decode) if step_ms is None else Budget(tokens=tokens, milliseconds=step_ms)
    longer = "" if step_ms is not None else f", or {STRETCH:g} times what these take alone,"
    text = (
        f"up to {budget.milliseconds:.3g} ms beside decodes{longer} and {tokens} tokens; a decode step took "
        f"{decode:.3g} ms at start"
    )
    return Pacing(budget, known or costs, costs, text)


def usual_budget(tokens: int, decode_ms: float) -> Budget:
    """What a step of a server may hold, if nobody says, where a decode step of one row takes `decode_ms`."""
    return Budget(tokens=tokens, milliseconds=max(LEAST_MS, DECODES * decode_ms), stretch=STRETCH)


def settle(executor: Executor, pacing: Pacing, seconds: float = SETTLE_SECONDS) -> Iterator[int]:
    """What a server does before anybody asks, so that no stream waits while memory is mapped: first the largest step
    there will be, then, a little at a time and for so long at most, the cache is written once, from the blocks on that
    are handed out first. On an executor that holds no rows, and for as long as it has held none -> each time, how many
    blocks of each group were written so far.
    """
    limits, budget = executor.capabilities(), pacing.budget
    steps = _Steps(executor, limits)
    most = min(budget.tokens or limits.max_tokens_per_step, limits.max_model_len - 1)
    most = min(most, limits.max_tokens_per_step, min(limits.blocks) * limits.block_size)
    if pacing.model is not None and budget.milliseconds is not None:
        longest = budget.milliseconds * budget.alone
        most = largest_chunk(ShapeBuilder(limits.windows), 0, most, pacing.model, longest)
    if most > 1:
        steps.seconds(0, most, tries=1)
    written, spent, blocks = 0, 0.0, max(limits.blocks)
    yield written
    while written < blocks and spent < seconds:
        began = time.monotonic()
        steps.write(written, written + TOUCHED)
        written = min(written + TOUCHED, blocks)
        spent += time.monotonic() - began
        yield written


class _Steps:
    """Steps of one row, at the beginning of the cache."""

    def __init__(self, executor: Executor, limits: Capabilities) -> None:
        self._executor = executor
        self._limits = limits
        self._numbers = itertools.count()

    def seconds(self, start: int, count: int, tries: int = TRIES) -> float:
        """The shortest of a few tries of a step that computes `count` tokens from `start` on."""
        blocks = -(-(start + count) // self._limits.block_size)
        table = tuple(tuple(range(blocks)) for _ in self._limits.blocks)
        params = SamplingParams(temperature=0.0, seed=0)
        row = RowInit(_LABEL, (0,) * (start + count), start + count, params, blocks=table)
        self._run(new=(row,), copies=self._copies(1, blocks))  # memory that was never written is not read like a cache
        work = (Work(_LABEL, start, count, logits=1, sample=True),)
        best = min(self._run(work=work) for _ in range(tries))
        self._run(gone=(_LABEL,))
        return best

    def write(self, first: int, end: int) -> None:
        """Something into blocks `first` to `end` - 1 of every group."""
        self._run(copies=self._copies(max(first, 1), end))

    def _copies(self, first: int, end: int) -> tuple[BlockCopy, ...]:
        return tuple(
            BlockCopy(group, 0, block)
            for group, size in enumerate(self._limits.blocks)
            for block in range(first, min(end, size))
        )

    def _run(self, **plan: object) -> float:
        number = next(self._numbers)
        self._executor.submit(StepPlan(number, **plan))  # type: ignore[arg-type]
        return self._executor.collect(number).seconds.executor
