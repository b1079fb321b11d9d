"""When requests start: open loops keep to a timetable whatever the endpoint does, closed loops wait for answers.

In an open loop every latency counts from the timetable, so neither a slow endpoint nor a late client can leave anything
out (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import functools
import gc
import resource
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from headway.bench.client import BenchClient
from headway.bench.dialects import text_of
from headway.bench.pace import Pacer
from headway.bench.workload import WorkItem
from headway.metrics.records import NS_PER_S, Failure, FailureKind, RequestRecord
from headway.metrics.run import Run
from headway.traffic.load import Load, timetable

START_DELAY = 0.05  # seconds between the decision to run and the first arrival's earliest moment
GIVE_UP_AFTER = 3  # failures in a row, without one byte of an answer, after which no more requests are sent
DEAD = frozenset({FailureKind.CONNECT, FailureKind.HUNG})
HEARTBEAT = 0.01  # seconds between two looks at how late the event loop is


Progress = Callable[[Sequence[RequestRecord], int, int], None]  # (finished so far, in flight, in all)


async def run_load(
    client: BenchClient,
    load: Load,
    items: Sequence[WorkItem],
    warmup: int = 0,
    progress: Progress | None = None,
    keep_text: bool = False,
) -> Run:
    """Send every item as the load says and wait for the last answer. The first `warmup` are marked as such.

    `keep_text`: the answers' texts stay on the records.
    """
    records = [
        RequestRecord(
            index=index,
            intended=0,
            max_tokens=item.max_tokens,
            prompt_bytes=len(text_of(item.prompt).encode()),
            prompt_wanted=item.wanted,
            warmup=index < warmup,
            text=[] if keep_text else None,
        )
        for index, item in enumerate(items)
    ]
    encoded = [client.encode(item.prompt, item.max_tokens) for item in items]
    run = Run(load, records)
    finished: list[RequestRecord] = []
    breaker = _Breaker(run)

    async def send(index: int) -> None:
        await client.send(encoded[index], records[index])
        finished.append(records[index])
        breaker.note(records[index])

    with _quiet_collector():
        began, cpu, chunks = time.perf_counter_ns(), _cpu_seconds(), client.chunks_received
        watch = asyncio.create_task(_watch(run, client, finished, progress))
        try:
            if load.open:
                await _open(send, records, timetable(load, [item.at for item in items]), breaker)
            else:
                await _closed(send, records, load.concurrency, breaker)
        finally:
            watch.cancel()
        seconds = max(1e-9, (time.perf_counter_ns() - began) / NS_PER_S)
    run.cpu_share = (_cpu_seconds() - cpu) / seconds
    run.chunks_per_second = (client.chunks_received - chunks) / seconds
    for record in records:
        if not record.ended:
            record.failure = Failure(FailureKind.NOT_SENT, f"not sent: {run.gave_up}")
    if progress is not None:
        progress(finished, 0, len(items))
    return run


class _Breaker:
    """Stops a run against an endpoint that has stopped answering at all, so that every run ends."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._row = 0
        self.open = asyncio.Event()

    def note(self, record: RequestRecord) -> None:
        dead = record.failure is not None and record.failure.kind in DEAD and not record.chunks
        self._row = self._row + 1 if dead else 0
        if self._row >= GIVE_UP_AFTER and not self.open.is_set():
            assert record.failure is not None
            self._run.gave_up = f"{self._row} requests in a row failed: {record.failure.message}"
            self.open.set()


async def _open(
    send: Callable[[int], Awaitable[None]], records: list[RequestRecord], times: list[float], breaker: _Breaker
) -> None:
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []
    start = time.perf_counter_ns() + round(START_DELAY * NS_PER_S)
    for record, at in zip(records, times, strict=True):
        record.intended = start + round(at * NS_PER_S)
    all_started = asyncio.Event()

    def launch(index: int) -> None:
        if not breaker.open.is_set():
            tasks.append(loop.create_task(send(index)))  # type: ignore[arg-type]
        if index == len(records) - 1:
            all_started.set()

    opened = loop.create_task(breaker.open.wait())
    started = loop.create_task(all_started.wait())
    with Pacer() as pacer:
        for index, record in enumerate(records):
            pacer.at(record.intended, functools.partial(launch, index))
        try:
            await asyncio.wait({opened, started}, return_when=asyncio.FIRST_COMPLETED)
            while pending := [task for task in tasks if not task.done()]:
                await asyncio.wait(pending)
            await asyncio.gather(*tasks)  # a bug in the client must not look like a quiet run
        finally:
            opened.cancel()
            started.cancel()


async def _closed(
    send: Callable[[int], Awaitable[None]], records: list[RequestRecord], concurrency: int, breaker: _Breaker
) -> None:
    waiting = iter(range(len(records)))

    async def user() -> None:
        for index in waiting:
            if breaker.open.is_set():
                return
            records[index].intended = time.perf_counter_ns()
            await send(index)

    await asyncio.gather(*(user() for _ in range(min(concurrency, len(records)))))


async def _watch(run: Run, client: BenchClient, finished: list[RequestRecord], progress: Progress | None) -> None:
    """Measure how late the event loop is, and show progress four times a second."""
    beats = 0
    while True:
        due = time.perf_counter_ns() + round(HEARTBEAT * NS_PER_S)
        await asyncio.sleep(HEARTBEAT)
        run.loop_lag_ms.append((time.perf_counter_ns() - due) / 1e6)
        beats += 1
        if progress is not None and beats % 25 == 0:
            progress(finished, client.in_flight, len(run.records))


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """No pause of the garbage collector in the middle of a measurement."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
