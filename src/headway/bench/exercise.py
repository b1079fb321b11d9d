"""Loads of many sizes against a server of ours on this machine: what it then did is what step times are fitted to."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

from headway.bench.client import BenchClient, Endpoint
from headway.bench.measure import first_contact
from headway.bench.workload import Prompts
from headway.core.errors import BadInput
from headway.engine.machine import wall_clock
from headway.measure.served import Window
from headway.metrics.records import RequestRecord
from headway.roofline.profile import FLIP, Rates


class Cell(NamedTuple):
    """A closed loop: requests always in flight, and their lengths."""

    concurrency: int
    prompt: int
    output: int


CELLS = (
    Cell(1, 32, 48), Cell(4, 400, 24), Cell(32, 48, 32), Cell(2, 1500, 16), Cell(8, 64, 48), Cell(1, 700, 8),
    Cell(16, 200, 32), Cell(3, 100, 64),
)  # fmt: skip


async def exercise(
    endpoint: Endpoint, seconds: float, probe: Callable[[], Rates],
    progress: Callable[[int, int], None] = lambda done, of: None, cells: tuple[Cell, ...] = CELLS,
) -> list[Window]:  # fmt: skip
    """Play all cells in `seconds` -> when each was played, and what the machine gave just before and after, in the
    mean. Those during which it changed its speed are left out, as long as half of them are left: on a machine that is
    never steady, the half during which it changed least.

    Raises:
        BadInput: nothing was answered.
    """
    clock, played, answered = wall_clock(), list[tuple[float, Window]](), 0
    async with BenchClient(endpoint) as client:
        contact = await first_contact(client, time.time_ns())
        if contact.dead is not None:
            raise BadInput("--url", f"no answer: {contact.dead.message}")
        prompts = Prompts(contact.measure, time.time_ns())
        before = probe()
        for number, cell in enumerate(cells):
            begin = clock.now()
            answered += await _play(client, cell, prompts, time.perf_counter() + seconds / len(cells))
            end, after = clock.now(), probe()
            played.append((before.change(after), Window(begin, end, before.between(after))))
            before = after
            progress(number + 1, len(cells))
    if not answered:
        raise BadInput("--url", f"{endpoint.url} answered no request of the loads")
    least = sorted(change for change, _ in played)[: -(-len(played) // 2)]
    most = max(FLIP, *least)
    return [window for change, window in played if change < FLIP or (most > FLIP and change <= most)]


async def _play(client: BenchClient, cell: Cell, prompts: Prompts, until: float) -> int:
    """Requests answered. One that fails is followed by the next: a server may refuse what is too long for it."""
    numbers, answered = itertools.count(), 0

    async def user() -> None:
        nonlocal answered
        while time.perf_counter() < until:
            text = prompts.unique(hash((cell, next(numbers))), cell.prompt)
            record = RequestRecord(index=0, intended=time.perf_counter_ns(), max_tokens=cell.output)
            await client.send(client.encode(text, cell.output), record)
            answered += record.completed
            if record.failure is not None:
                await asyncio.sleep(0.2)

    await asyncio.gather(*(user() for _ in range(cell.concurrency)))
    return answered
