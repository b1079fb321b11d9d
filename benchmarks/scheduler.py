"""Time of the scheduler alone: 256 decoding rows, planned and committed, at short and long contexts.

    python benchmarks/scheduler.py

The bar is 1 ms per step, the same at a context of 100 and of 10,000 tokens: a step costs what changes, not what is
there (the little that is added up to 10,000 and no further is the processor's caches). CPU time of the thread, so that
neighbours on the machine do not count. Last results (2 vCPU x86-64 container, CPython 3.11.7), milliseconds per step:

                                           plan   commit     both      p99
    256 rows at 100 tokens                0.149    0.264    0.414    1.963
    256 rows at 1000 tokens               0.152    0.267    0.422    1.245
    256 rows at 10000 tokens              0.171    0.333    0.510    1.017
    256 rows at 40000 tokens              0.172    0.343    0.517    1.005
    with predicted time                   0.245    0.270    0.524    1.362
    with an event log                     0.283    0.289    0.594    1.471
    with a second, windowed group         0.156    0.516    0.692    1.819

p99 is the one step in 32 in which all rows, being equally long here, cross a block boundary at once.
"""

from __future__ import annotations

import argparse
import statistics
import time

from headway.core.events import EventLog
from headway.core.request import Request, SamplingParams
from headway.core.step import Capabilities, StepResult, StepShape
from headway.roofline.fixed import FixedCosts
from headway.scheduling.scheduler import Scheduler

ROWS = 256
BLOCK = 32


class PerToken(FixedCosts, frozen=True):
    """The cheapest step-time model, so that what is timed is the scheduler's part."""

    def predict(self, shape: StepShape) -> float:
        return shape.tokens * 1e-3


def decoding(context: int, log: EventLog | None, model: PerToken | None, window: int | None) -> Scheduler:
    """A scheduler with `ROWS` rows whose prompts of `context` tokens are computed."""
    blocks = ROWS * (context // BLOCK + 40)
    limits = Capabilities(
        block_size=BLOCK,
        blocks=(blocks,) if window is None else (blocks, blocks),
        windows=(None,) if window is None else (None, window),
        max_rows=ROWS,
        max_tokens_per_step=1 << 16,
        max_model_len=context + 2000,
    )
    scheduler = Scheduler(limits, key=b"benchmark", log=log, model=model)
    params = SamplingParams(seed=0)
    for row in range(ROWS):
        scheduler.add(Request(f"row-{row}", [row] * context, params, stop_ids=frozenset({2}), max_len=context + 1500))
    while any(row.request.todo > 1 for row in scheduler.state.rows.values()):
        step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> tuple[float, float]:
    """One step -> seconds of plan and of commit; making up the result is not counted."""
    begin = time.thread_time()
    plan = scheduler.plan(0)
    planned = time.thread_time()
    result = StepResult(plan.step, {work.id: (7,) for work in plan.work if work.sample})
    computed = time.thread_time()
    scheduler.commit(result, 0)
    return planned - begin, time.thread_time() - computed


def measure(
    context: int, steps: int, *, logged: bool = False, predicted: bool = False, window: int | None = None
) -> str:
    log = EventLog(lambda event: None) if logged else None
    scheduler = decoding(context, log, PerToken() if predicted else None, window)
    times = [step(scheduler) for _ in range(steps)]
    plan, commit = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    both = sorted(1e3 * (first + second) for first, second in times)
    return f"{plan:8.3f} {commit:8.3f} {statistics.median(both):8.3f} {both[int(0.99 * steps)]:8.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="steps to time in each setting")
    steps = parser.parse_args().steps
    print(f"{'':34} {'plan':>8} {'commit':>8} {'both':>8} {'p99':>8}")
    for context in (100, 1_000, 10_000, 40_000):
        print(f"{f'{ROWS} rows at {context} tokens':34}", measure(context, steps))
    print(f"{'with predicted time':34}", measure(1_000, steps, predicted=True))
    print(f"{'with an event log':34}", measure(1_000, steps, logged=True))
    print(f"{'with a second, windowed group':34}", measure(1_000, steps, window=512))


if __name__ == "__main__":
    main()
