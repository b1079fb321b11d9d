"""How fast simulations are, in CPU seconds beside wall time, for neighbours on the machine do not count in the first.

    python benchmarks/simulate.py                     # under two minutes
    python benchmarks/simulate.py --replicas 1000     # an hour of a thousand replicas

The bars: a million simulated requests a minute at 8 running and 200,000 at 64, in one process, requests as long as
those of the Azure conversation trace; an hour of 1,000 replicas at half a request a second each in ten minutes and
4 GiB. All count from the requests to the summary that `headway simulate --json` prints. `scheduler` is the same
through the scheduler that serves, which plays what is not plain (see docs/simulate.md). Last results (2 vCPU x86-64
container with little else to do, lengths drawn like the trace's):

                                            requests    CPU s   wall s  per CPU min peak GiB
    1 running                                  50000      2.5      2.6    1,179,879     0.14
    8 running                                 100000      4.4      4.4    1,378,151     0.23
    64 running                                100000      4.6      4.6    1,303,258     0.23
    8 running, scheduler                        2000      1.8      1.8       68,314     0.23
    64 running, scheduler                       1000      1.9      1.9       31,108     0.23
    an hour of 100 replicas                   180000      9.4      9.5    1,147,128     0.37
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from headway.engine.references import load_device, load_shape
from headway.simulate import play as playing
from headway.simulate.arrivals import Arrivals, Closed, Lengths
from headway.simulate.deploy import Deployed, EngineSetup, deployed
from headway.simulate.driver import Source
from headway.traffic.load import Load
from headway.traffic.traces import TraceRow, read_trace

AZURE = Lengths(
    input_tokens=1155, output_tokens=211, input_cv=0.96, output_cv=0.77
)  # means and variation of the conversation trace
RATE = 0.5  # requests per second and replica


def rows_of(trace: Path | None, count: int) -> list[TraceRow]:
    """Requests with the lengths of the trace, again and again; without one, drawn like it."""
    noise = random.Random(0)
    if trace is None:
        return [TraceRow(0.0, *AZURE.draw(noise)) for _ in range(count)]
    return noise.choices(read_trace(trace), k=count)


def timed(name: str, rows: list[TraceRow], run: Callable[[], object]) -> None:
    begin, cpu = time.perf_counter(), time.process_time()
    run()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # GiB; Linux counts in KiB
    print(f"{name:38} {len(rows):9} {cpu:8.1f} {wall:8.1f} {60 * len(rows) / cpu:12,.0f} {peak:8.2f}", flush=True)


def by_the_scheduler(one: Deployed, source: Source) -> None:
    trail, _ = playing._play(one, source, 1, playing.front_of(one, 1, playing.IN_TURN), 0, lambda ended: None)
    assert trail.counts["finished"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="an Azure .csv, to take its lengths")
    parser.add_argument("--replicas", type=int, default=100)
    args = parser.parse_args()
    one = deployed(load_shape("llama-3.1-8b"), load_device("h100-sxm"), 1, EngineSetup(prefix_cache=False))
    print(f"{'':38} {'requests':>9} {'CPU s':>8} {'wall s':>8} {'per CPU min':>12} {'peak GiB':>8}")
    for running, count in ((1, 50_000), (8, 100_000), (64, 100_000)):
        rows, load = rows_of(args.trace, count), Load("closed", concurrency=running)
        timed(f"{running} running", rows, partial(playing.play, one, Closed(rows, running), load, detail=0))
    for running, count in ((8, 2_000), (64, 1_000)):
        rows = rows_of(args.trace, count)
        timed(f"{running} running, scheduler", rows, partial(by_the_scheduler, one, Closed(rows, running)))
    rows, load = rows_of(args.trace, round(args.replicas * 3600 * RATE)), Load(rate=args.replicas * RATE)
    hour = partial(playing.play, one, Arrivals(rows, load), load, replicas=args.replicas, detail=0)
    timed(f"an hour of {args.replicas} replicas", rows, hour)


if __name__ == "__main__":
    main()
