"""How fast and how late is this client, here and now? Asked before every run, against a mock of known timing.

The mock runs in a process of its own on the loopback and tells in each answer how long it really held the request back,
so what is left over is the client's (and the kernel's) doing. Whatever else this machine is busy with is in the
figures, as it will be in the run's.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Coroutine
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from headway.bench.client import BenchClient, Endpoint, Timeouts
from headway.bench.load import run_load
from headway.bench.workload import WorkItem
from headway.core.errors import HeadwayError
from headway.engine.machine import event_loop_factory
from headway.metrics.records import NS_PER_MS, RequestRecord
from headway.metrics.run import Run
from headway.traffic.load import Load

RATE = 200.0  # requests per second of the latency phase
SAMPLES = 240
STREAMS, CHUNKS = 64, 600  # of the ceiling phase
BUSY = 0.7  # share of the ceiling, or of a core, above which the client is taken for the bottleneck

T = TypeVar("T")


@dataclass(frozen=True)
class SelfTest:
    """What the client can do here.

    Attributes:
        ceiling: streamed chunks per second received from a mock that writes as fast as it can. The mock has its limits
            too, so this is a lower bound.
        added_p50_ms, added_p99_ms: added time to first token at 200 requests/s.
        loop: the event loop's implementation.
    """

    ceiling: float
    added_p50_ms: float
    added_p99_ms: float
    loop: str


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on the fastest event loop there is."""
    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        return runner.run(work)


async def self_test() -> SelfTest:
    """Takes about two seconds.

    Raises:
        HeadwayError: the mock did not start or the client failed against it.
    """
    mock = subprocess.Popen(
        [sys.executable, "-m", "headway.bench.mock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert mock.stdin is not None and mock.stdout is not None
    try:
        line = await asyncio.to_thread(mock.stdout.readline)
        if not line.strip().isdigit():
            raise HeadwayError("the client's self-test could not start its mock server (skip it with --no-self-test)")
        url = f"http://127.0.0.1:{line.strip()}"
        latency = await _phase(url, Load("poisson", rate=RATE), SAMPLES, {"ttft": 0.01, "gap": 0.004, "chunks": 5})
        ceiling = await _phase(url, Load("closed", concurrency=STREAMS), STREAMS, {"chunks": CHUNKS})
    finally:
        mock.stdin.close()
        mock.terminate()
        await asyncio.to_thread(mock.wait)
    added = np.percentile([_added_ms(record) for record in latency.records], [50, 99])
    loop = type(asyncio.get_running_loop()).__module__.split(".")[0]
    return SelfTest(ceiling.chunks_per_second, float(added[0]), float(added[1]), loop)


async def _phase(url: str, load: Load, count: int, script: dict[str, Any]) -> Run:
    endpoint = Endpoint.parse(url, "chat", model="mock", extra=json.dumps({"mock": script}))
    async with BenchClient(endpoint, Timeouts(stall=10, total=30)) as client:
        run = await run_load(client, load, [WorkItem("one two three", 4096)] * count)
    failed = [record.failure.message for record in run.records if record.failure is not None]
    if failed:
        raise HeadwayError(f"the client failed its own self-test: {failed[0]} (skip it with --no-self-test)")
    return run


def _added_ms(record: RequestRecord) -> float:
    """Time to first token less what the mock says it held the request back."""
    assert record.server_id is not None and record.ttft_ms is not None
    return record.ttft_ms - int(record.server_id.removeprefix("mock-")) / NS_PER_MS


def client_report(test: SelfTest | None, run: Run) -> dict[str, Any]:
    """The `client` object of the JSON contract: could the client have measured this run?

    A run is invalid if the client was the bottleneck: near its ceiling, out of CPU, or so late that it shows in the
    time to first token (more than 5 ms and more than a tenth of the median, at p99 of the starts).
    """
    records = [record for record in run.records if record.sent and not record.warmup]
    late = [(record.sent - record.intended) / NS_PER_MS for record in records] if run.load.open else []
    ttft = [value for record in records if (value := record.ttft_ms) is not None]
    lag = float(np.percentile(run.loop_lag_ms, 99)) if run.loop_lag_ms else None
    behind = max(float(np.percentile(late, 99)) if late else 0.0, lag or 0.0)
    reasons = []
    if test is not None and run.chunks_per_second > BUSY * test.ceiling:
        reasons.append(
            f"{run.chunks_per_second:.0f} chunks/s is over {BUSY:.0%} of this client's ceiling {test.ceiling:.0f}"
        )
    if run.cpu_share > BUSY:
        reasons.append(f"the client used {run.cpu_share:.0%} of a core")
    if behind > max(5.0, 0.1 * float(np.median(ttft)) if ttft else 5.0):
        reasons.append(f"the client was up to {behind:.1f} ms late (p99), which shows in the time to first token")
    return {
        "ceiling": test.ceiling if test else None,
        "ceiling_unit": "streamed chunks/s, a lower bound",
        "added_latency_ms": test.added_p99_ms if test else None,
        "added_latency_p50_ms": test.added_p50_ms if test else None,
        "valid": not reasons,
        "reason": "; ".join(reasons) or None,
        "late_p99_ms": behind,
        "loop_lag_p99_ms": lag,
        "cpu_share": run.cpu_share,
        "chunks_per_second": run.chunks_per_second,
        "self_test": asdict(test) if test else None,
    }
