"""Ten times what a server can do, for a minute: does it go on doing what it can, and say truly when to come back?

    python benchmarks/overload.py [--seconds 60] [--json benchmarks/data/overload.json]

First as many clients as it has rows, twice over, each sending its next request when the last is answered: what is
answered per second is the peak. Then requests arrive at ten times that rate. Bars: at least 90 % of the peak is
answered; every Retry-After of a refusal is within a factor of two of what requests accepted at that time waited for
their first token; p99 of /health, asked by another process, below 200 ms; memory flat after the first quarter.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import numpy as np

from live_server import Live, Pulse, live

ROWS, QUEUED = 16, 48
PROMPT, TOKENS = 64, 32
TIMES = 10
FLAT = 0.05  # share that memory may grow by


class Clients:
    """Requests to one server, each with when it was sent and what became of it."""

    def __init__(self, host: str, port: int, words: int) -> None:
        self._at = (host, port)
        self._words = words
        self._random = random.Random(words)
        self.sent: list[dict[str, float]] = []  # at, and: first, last (s after `at`), or: retry (Retry-After)

    def _body(self) -> bytes:
        prompt = [self._random.randrange(100, self._words) for _ in range(PROMPT)]
        return json.dumps({"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}).encode()

    async def ask(self) -> None:
        entry = {"at": time.monotonic()}
        self.sent.append(entry)
        body = self._body()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        try:
            reader, writer = await asyncio.open_connection(*self._at)
        except OSError:
            return
        writer.write(f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        try:
            status = int((await reader.readline()).split()[1])
            while (line := await reader.readline()).strip():
                if line.lower().startswith(b"retry-after:"):
                    entry["retry"] = float(line.split(b":")[1])
            if status == 200:
                await self._stream(reader, entry)
        except (OSError, IndexError, ValueError):
            pass
        finally:
            writer.close()

    async def _stream(self, reader: asyncio.StreamReader, entry: dict[str, float]) -> None:
        while line := await reader.readline():
            if b'"text":' in line and "first" not in entry:
                entry["first"] = time.monotonic() - entry["at"]
            if b"[DONE]" in line:
                entry["last"] = time.monotonic() - entry["at"]

    async def closed(self, clients: int, seconds: float) -> None:
        """So many clients, each with one request in flight."""
        end = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < end:
                await self.ask()

        await asyncio.gather(*(client() for _ in range(clients)))

    async def open(self, rate: float, seconds: float) -> None:
        """Requests at a rate, and then until all of them are answered."""
        begin, tasks = time.monotonic(), []
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, begin + number / rate - time.monotonic()))
            tasks.append(asyncio.create_task(self.ask()))
        await asyncio.gather(*tasks)


def drive(pipe: Any, host: str, port: int, words: int, kind: str, amount: float, seconds: float) -> None:
    clients = Clients(host, port, words)
    asyncio.run(clients.closed(int(amount), seconds) if kind == "closed" else clients.open(amount, seconds))
    pipe.send(clients.sent)


def run(server: Live, kind: str, amount: float, seconds: float) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Clients in a process of their own -> their requests, and what was seen of the server meanwhile."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=drive, args=(theirs, server.host, server.port, 30_000, kind, amount, seconds))
    process.start()
    pulse, resident = Pulse(server), []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        resident.append(server.resident())
        time.sleep(0.5)
    seen = {"health": pulse.take(), "resident_mib": [size >> 20 for size in resident]}
    pulse.stop()
    sent = ours.recv()
    process.join()
    return sent, seen


def answered(sent: list[dict[str, float]], begin: float, seconds: float) -> float:
    """Answers per second that were complete in the part of a run when it was full."""
    done = [entry["at"] + entry["last"] - begin for entry in sent if "last" in entry]
    start = 0.25 * seconds
    return sum(start <= at <= seconds for at in done) / (seconds - start)


def truth_of(sent: list[dict[str, float]]) -> list[float]:
    """Of each refusal: its Retry-After over what requests accepted at that moment waited, at least a second."""
    waited = sorted((entry["at"], entry["first"]) for entry in sent if "first" in entry)
    if not waited:
        return []
    at, wait = np.array(waited).T
    return [entry["retry"] / max(1.0, float(np.interp(entry["at"], at, wait))) for entry in sent if "retry" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path, help="where to keep the results")
    args = parser.parse_args()
    with live("--max-rows", str(ROWS), "--max-queued", str(QUEUED), "--max-model-len", "2048") as server:
        sent, calm = run(server, "closed", 2 * ROWS, args.seconds / 2)
        peak = answered(sent, sent[0]["at"], args.seconds / 2)
        sent, seen = run(server, "open", TIMES * peak, args.seconds)
    goodput = answered(sent, sent[0]["at"], args.seconds)
    ratios = truth_of(sent)
    resident = seen["resident_mib"]
    grown = resident[-1] / resident[len(resident) // 4] - 1
    results = {
        "peak_per_s": round(peak, 2), "offered_per_s": round(TIMES * peak, 2), "goodput_per_s": round(goodput, 2),
        "sent": len(sent), "refused": len(ratios), "health_at_peak": calm["health"], "health": seen["health"],
        "retry_after_over_truth": [round(float(x), 2) for x in np.quantile(ratios, (0, 0.5, 1))] if ratios else [],
        "retry_after_true": round(float(np.mean([0.5 <= x <= 2 for x in ratios])), 3) if ratios else None,
        "resident_mib": [resident[0], resident[len(resident) // 4], resident[-1]],
    }  # fmt: skip
    for name, value in results.items():
        print(f"{name:24}", value)
    print(f"goodput: {goodput / peak:.0%} of the peak (bar 90 %); memory {grown:+.1%} (bar {FLAT:.0%})")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
