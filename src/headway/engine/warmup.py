"""The first steps of an engine, before anybody asks: they have its buffers mapped, and tell how long its steps take.

Five kinds of step are enough for a model of step times that the scheduler can size its work with: a decode and a
chunk, each without a context and behind a long one, and a decode of several rows, which computes logits of each. Where
drafts are verified, steps of a few are measured as well.
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
ROWS = 8  # of the decode of several
POSITIONS = (2, 4, 5, 8, 16)  # of steps that verify drafts: kernels take four or eight rows at a time
TRIES, MOST_TRIES, ENOUGH = 2, 8, 0.05  # of a step: at least, at most, and seconds after which there are no more

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
    rows = min(ROWS, limits.max_rows)
    several = steps.seconds(0, 1, rows=rows)
    decode = min(decode, steps.seconds(0, 1))  # the first ones were cold
    token = max(0.0, (prefill - decode) / (chunk - 1))
    logit = max(0.0, (several - decode) / (rows - 1) - token) if rows > 1 else 0.0
    pair = max(0.0, (far_prefill - prefill - far_decode + decode) / ((chunk - 1) * context))
    verified = [count for count in POSITIONS if count <= min(limits.max_drafts, context, limits.max_tokens_per_step)]
    return FixedCosts(
        step=max(0.0, decode - token - logit),
        token=token,
        logit=logit,
        pair=pair,
        kv_token=max(0.0, (far_decode - decode) / context - pair),
        bends=tuple(
            [
                (count, steps.seconds(0, count, drafts=True) - decode - (count - 1) * (token + logit))
                for count in (verified if decode < SLOW else ())
            ]
        ),
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
    decode = 1e3 * (costs.step + costs.token + costs.logit)
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
    """Steps of rows that all lie at the beginning of the cache."""

    def __init__(self, executor: Executor, limits: Capabilities) -> None:
        self._executor = executor
        self._limits = limits
        self._numbers = itertools.count()

    def seconds(self, start: int, count: int, tries: int = MOST_TRIES, rows: int = 1, *, drafts: bool = False) -> float:
        """The shortest of a few tries of a step that computes `count` tokens of each row from `start` on. drafts: all
        but the first are drafts."""
        blocks = -(-(start + count) // self._limits.block_size)
        table = tuple(tuple(range(blocks)) for _ in self._limits.blocks)
        params = SamplingParams(temperature=0.0, seed=0)
        labels = [f"{_LABEL} {number}" for number in range(rows)]
        known, draft = (start + 1, (0,) * (count - 1)) if drafts else (start + count, ())
        new = [RowInit(label, (0,) * known, known, params, blocks=table) for label in labels]
        self._run(new=tuple(new), copies=self._copies(1, blocks))  # memory never written is not read like a cache
        work = tuple([Work(label, start, count, draft, logits=1 + len(draft), sample=True) for label in labels])
        taken = [self._run(work=work)]
        while len(taken) < tries and (len(taken) < TRIES or sum(taken) < ENOUGH):
            taken.append(self._run(work=work))
        self._run(gone=tuple(labels))
        return min(taken)

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
