"""What a step costs besides the forward pass: planning, laying out the batch, sampling, committing, output messages.

    python benchmarks/host.py [--model FILE.gguf] [--steps 200] [--warm] [--json]

Milliseconds of one decoding step outside of the call into the backend's program, which is everything Python does, and
the sampling call, with an event log attached as a server has it. Median and 99th percentile over steps, by number of
rows and by what they sample with; and of the median the parts: laying out, sampling (most of it one native call on all
threads), the rest; and `cpu`, the median of the loop thread's own processor time. With `--warm` a forward pass of a
size is run once, and its logits are taken again: what is left is the same work with its memory in cache, which a
forward pass drives out. The bar is 0.5 ms at 32 rows: greedy is 10 % above it, draws that race are not there. Last
results (SmolLM2-135M, 2 vCPU x86-64 container shared with other work, 40 steps; with one numpy call per row and stage
it was 1.17, 28.4, 20.4, 6.5 and 1.67 ms), 32 rows:

    ms per step                        median      p99    prepare  sample    rest
    greedy                              0.554    0.692      0.082   0.124   0.348
    temperature 0.8, top_p 0.95         1.825    2.313      0.090   1.339   0.396
    temperature 1                       1.569    2.385      0.091   1.087   0.391
    temperature 0.7, top_k 40           0.940    1.241      0.096   0.482   0.363
    greedy, repetition_penalty 1.1      1.340    1.666      0.080   0.893   0.367

Greedy, 32 rows, on a Zen 3 machine of two cores, while others worked on them (2026-12-01): `cpu` 0.77 to 1.10 ms after
forward passes, 0.28 to 0.30 ms warm (at its fastest clock; both vary by half with the clock). So more than half of it
is memory that comes back to the cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from headway.core.events import AnyEvent, StepDone
from headway.core.request import SamplingParams
from headway.engine.build import build_engine
from headway.engine.engine import Engine
from headway.engine.messages import Submit
from headway.engine.options import EngineOptions

ROWS = (1, 8, 32)
PROMPT_TOKENS = 32
SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0},
    "temperature 0.8, top_p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "temperature 1": {"temperature": 1},
    "temperature 0.7, top_k 40": {"temperature": 0.7, "top_k": 40},
    "greedy, repetition_penalty 1.1": {"temperature": 0, "repetition_penalty": 1.1},
}


@dataclass
class Times:
    """Milliseconds of each step: all but the forward pass, by the clock and of the thread's processor time, and the
    parts of it that the executor measures."""

    host: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    prepare: list[float] = field(default_factory=list)
    sample: list[float] = field(default_factory=list)


class Meter:
    """A fold that keeps the last step."""

    def __init__(self) -> None:
        self.last: StepDone | None = None

    def fold(self, event: AnyEvent) -> None:
        if isinstance(event, StepDone):
            self.last = event


class Watched:
    """A program that knows how long its last run took the calling thread. `warm`: only the first of its size is run."""

    def __init__(self, program: Any, warm: bool) -> None:
        self._program, self._warm = program, warm
        self._logits: Any = None
        self.cpu = self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def run(self, batch: Any) -> Any:
        clock, cpu = time.perf_counter(), time.thread_time()
        if not self._warm or self._logits is None or len(self._logits.rows) != len(batch.logit_index):
            self._logits = self._program.run(batch)
        self.cpu, self.seconds = time.thread_time() - cpu, time.perf_counter() - clock
        return self._logits


def measure(
    engine: Engine, meter: Meter, program: Watched, rows: int, fields: dict[str, float], steps: int, salt: int
) -> Times:
    """Decode `rows` sequences for `steps` steps."""
    for row in range(rows):
        tokens = tuple(1000 + ((salt + row) * 7919 + at * 104729) % 40000 for at in range(PROMPT_TOKENS))
        params = SamplingParams(max_tokens=steps + 8, ignore_eos=True, seed=row, **fields)  # type: ignore[arg-type]
        engine.loop.submit(Submit(f"{salt}-{row}", tokens, params))
    times = Times()
    while not engine.loop.idle:
        begin, cpu = time.perf_counter(), time.thread_time()
        engine.loop.turn()
        elapsed, cpu = time.perf_counter() - begin, time.thread_time() - cpu
        done = meter.last
        if done is None or len(done.rows) < rows or max(done.counts) > 1:
            continue  # prompts are still being computed, or rows have ended
        times.host.append(1e3 * (elapsed - program.seconds))
        times.cpu.append(1e3 * (cpu - program.cpu))
        times.prepare.append(1e3 * done.seconds.prepare)
        times.sample.append(1e3 * done.seconds.sample)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm", action="store_true", help="without the forward passes")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    meter = Meter()
    options = EngineOptions(model=args.model, backend=args.backend, max_model_len=1024, max_rows=max(ROWS))
    engine = build_engine(options, subscribers=(meter.fold,))
    executor: Any = engine.loop.executor
    executor._program = program = Watched(executor._program, args.warm)
    report = []
    if not args.json:
        print(
            f"{'ms per step':<32}{'rows':>5}{'median':>9}{'p99':>9}{'cpu':>9}   {'prepare':>8}{'sample':>8}{'rest':>8}"
        )
    for number, (name, fields) in enumerate(SETTINGS.items()):
        for rows in ROWS:
            times = measure(engine, meter, program, rows, fields, args.steps, 1000 * number + 100 * rows)
            every = (times.host, times.cpu, times.prepare, times.sample)
            host, cpu, prepare, sample = map(statistics.median, every)
            p99 = sorted(times.host)[int(0.99 * len(times.host))]
            report.append(
                {"what": name, "rows": rows, "median_ms": host, "p99_ms": p99, "cpu_ms": cpu, "sample_ms": sample}
            )
            if not args.json:
                parts = f"{prepare:8.3f}{sample:8.3f}{host - prepare - sample:8.3f}"
                print(f"{name:<32}{rows:>5}{host:9.3f}{p99:9.3f}{cpu:9.3f}   {parts}")
    if args.json:
        print(json.dumps({"rows": report}))
    engine.close()


if __name__ == "__main__":
    main()
