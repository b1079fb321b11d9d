"""Steps of a chosen size through the model executor, timed: what a profile is fitted on, and what a checkup measures.

A step is timed as the engine's own steps are (building the batch, computing, drawing greedy tokens) and between two
probes of memory and arithmetic, because a shared machine changes its speed within seconds. A probe also pushes the
weights out of the caches, as the rest of a large model would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headway.core.request import SamplingParams
from headway.core.step import BlockIds, Capabilities, RowInit, StepPlan, StepResult, StepShape, Work
from headway.executor.model import ModelExecutor
from headway.measure.fit import Observation
from headway.measure.patience import Patience
from headway.ops.protocol import Backend, Forward
from headway.roofline.profile import Rates
from headway.roofline.step import StepTime
from headway.scheduling.shape import shape_of
from headway.shape.model import ModelShape

BLOCK = 32


@dataclass(frozen=True)
class Point:
    """A size of step: `rows` decodes at `context` tokens, and a chunk of `chunk` prompt tokens (0 = none) behind
    `behind` that are cached."""

    rows: int
    context: int
    chunk: int = 0
    behind: int = 0

    @property
    def name(self) -> str:
        parts = [f"decode {self.rows} at {self.context}"] if self.rows else []
        behind = f" behind {self.behind}" if self.behind else ""
        return " + ".join(parts + ([f"prefill {self.chunk}{behind}"] if self.chunk else []))


class Trial:
    """A loaded model, made to run steps of any of `points`.

    Args:
        backend, forward, shape: of the model; the backend's cache is allocated here.
        points: all sizes that will be asked for.
    """

    def __init__(self, backend: Backend, forward: Forward, shape: ModelShape, points: Sequence[Point]) -> None:
        per_row = {point.context: -(-(point.context + 1) // BLOCK) for point in points}
        chunk = max((point.chunk for point in points), default=0)
        prompt = max([1, *(point.behind + point.chunk for point in points)])
        most = {context: max(p.rows for p in points if p.context == context) for context in per_row}
        blocks = sum(most[context] * per_row[context] for context in per_row) + -(-prompt // BLOCK)
        rows = sum(most.values()) + 1
        self._groups = len(shape.groups)
        self._limits = Capabilities(
            block_size=BLOCK,
            blocks=(blocks,) * self._groups,
            windows=tuple(group.window for group in shape.groups),
            max_rows=rows,
            max_tokens_per_step=max(chunk, 1) + rows,
            max_model_len=max([prompt, *(context + 1 for context in per_row)]) + 1,
        )
        self._executor = ModelExecutor(backend, forward, shape.groups, self._limits)
        self._step = 0
        self._vocab = shape.vocab
        self._next = 0
        for group in range(self._groups):  # every page of the cache must be memory of its own: write it once
            backend.copy_blocks(group, [(0, block) for block in range(1, blocks)])
        self._rows = {
            context: [self._row(f"{context}.{number}", context, per_row[context]) for number in range(most[context])]
            for context in per_row
        }
        self._chunk = self._row("chunk", prompt, -(-prompt // BLOCK))

    def _row(self, id: str, length: int, blocks: int) -> RowInit:
        table = tuple(range(self._next, self._next + blocks))
        self._next += blocks
        tokens = tuple((index * 7919 + 13) % (self._vocab - 1) for index in range(length))
        tables: BlockIds = (table,) * self._groups
        return RowInit(id, tokens, length, SamplingParams(temperature=0.0, seed=0), blocks=tables)

    def run(self, point: Point) -> tuple[StepShape, float]:
        """The step's size, and the seconds it took."""
        rows = self._rows[point.context][: point.rows] if point.rows else []
        work = [Work(row.id, point.context - 1, 1, logits=1, sample=True) for row in rows]
        if point.chunk:
            rows = [*rows, self._chunk]
            work.append(Work(self._chunk.id, point.behind, point.chunk, logits=1, sample=True))
        self._collect(StepPlan(self._step, new=tuple(rows)))  # rows are created outside of the measured step
        plan = StepPlan(self._step, work=tuple(work))
        result = self._collect(plan)
        self._collect(StepPlan(self._step, gone=tuple(row.id for row in rows)))
        return shape_of(plan, self._limits.windows).touching(result.experts), result.seconds.total

    def _collect(self, plan: StepPlan) -> StepResult:
        self._step += 1
        return self._executor.collect(self._executor.submit(plan))

    def close(self) -> None:
        self._executor.close()


def observe(
    trial: Trial, model: StepTime, points: Sequence[Point], probe: Callable[[], Rates], rounds: int,
    progress: Callable[[], None] = lambda: None, patience: Patience | None = None,
) -> list[Observation]:  # fmt: skip
    """Run every point `rounds` times, in turns, each between two probes. Steps while the machine changed its speed are
    left out, unless a point has no others.

    Args:
        model: of the trial's model, to say what a step has to do.
        probe: measures the machine.
        patience: when it runs out, what was observed until then is all.
    """
    found: list[Observation] = []
    unsteady: list[Observation] = []
    before = probe()
    for _ in range(rounds):
        for point in points:
            if patience is not None and patience.over:
                break
            shape, seconds = trial.run(point)
            after = probe()
            name = f"{model.shape.name}: {point.name}"
            kept = found if before.steady(after) else unsteady
            kept.append(Observation(model.work(shape), *before.between(after), seconds, name))
            before = after
            progress()
    seen = {one.point for one in found}
    return found + [one for one in unsteady if one.point not in seen]
