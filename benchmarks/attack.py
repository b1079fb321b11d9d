"""What a server does under clients that mean harm: is it still there for others, and does it get everything back?

    python benchmarks/attack.py [--seconds 15] [--json benchmarks/data/attack.json]

One after the other, then all together: eight clients that read a byte now and then of long answers, 32 uploads that
stall, chunked bodies with trailers without end, garbage instead of requests, and four clients that send prompts of
600 kB as fast as they can. Meanwhile another process (this one) asks for /health 20 times a second and for a one-token
answer once a second. Bars: p99 of /health below 200 ms in every part; afterwards no request, cache block or descriptor
is held any more, and no memory worth mentioning.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import os
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from live_server import Live, Pulse, live

SLOW_READERS, UPLOADS, TRAILERS, GARBAGE, LARGE = 8, 32, 4, 4, 4
BAR_MS = 200
BACK_SECONDS = 150  # the longest limit of the server, and some
GROWTH = 64 << 20  # bytes of memory that may stay


class Attack:
    """Clients in one process, all on one event loop."""

    def __init__(self, host: str, port: int) -> None:
        self._at = (host, port)

    def _head(self, path: str, *lines: str) -> bytes:
        return "\r\n".join([f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *lines,
                            "", ""]).encode()  # fmt: skip

    async def slow_reader(self) -> None:
        body = json.dumps({"prompt": "Count:", "max_tokens": 2000, "ignore_eos": True, "stream": True}).encode()
        reader, writer = await asyncio.open_connection(*self._at, limit=256)
        writer.write(self._head("/v1/completions", f"content-length: {len(body)}") + body)
        while await reader.read(1):
            await asyncio.sleep(0.5)

    async def upload(self) -> None:
        _, writer = await asyncio.open_connection(*self._at)
        writer.write(self._head("/v1/completions", "content-length: 4000000") + b'{"prompt": "' + b"x" * 100_000)
        await asyncio.sleep(3600)

    async def trailers(self) -> None:
        _, writer = await asyncio.open_connection(*self._at)
        writer.write(self._head("/v1/completions", "transfer-encoding: chunked"))
        writer.write(b'10\r\n{"prompt": "hi"}\r\n0\r\n')
        while True:
            writer.write(b"x-trailer: " + b"y" * 1000 + b"\r\n")
            await writer.drain()

    async def garbage(self) -> None:
        _, writer = await asyncio.open_connection(*self._at)
        writer.write(os.urandom(random.randrange(1, 4000)))
        await writer.drain()
        writer.close()
        await asyncio.sleep(0.02)

    async def large(self) -> None:
        text = " ".join(random.choice(("alpha", "beta", "gamma", "delta")) for _ in range(110_000))
        body = json.dumps({"prompt": text, "max_tokens": 1}).encode()
        reader, writer = await asyncio.open_connection(*self._at)
        writer.write(self._head("/v1/completions", f"content-length: {len(body)}", "connection: close") + body)
        await reader.read()

    async def again(self, client: Any) -> None:
        """That client, again and again, however it ends."""
        while True:
            with suppress(OSError):
                await client()
            await asyncio.sleep(0.01)

    async def run(self, kinds: list[str], seconds: float) -> None:
        many = {"slow readers": (self.slow_reader, SLOW_READERS), "stalled uploads": (self.upload, UPLOADS),
                "trailers": (self.trailers, TRAILERS), "garbage": (self.garbage, GARBAGE),
                "600 kB prompts": (self.large, LARGE)}  # fmt: skip
        tasks = [
            asyncio.create_task(self.again(client))
            for client, count in map(many.__getitem__, kinds)
            for _ in range(count)
        ]
        await asyncio.sleep(seconds)  # parts without a client of their own are measured as long
        for task in tasks:
            task.cancel()


def attack(host: str, port: int, kinds: list[str], seconds: float) -> None:
    asyncio.run(Attack(host, port).run(kinds, seconds))


def one_token(server: Live) -> float | None:
    """Seconds that a one-token answer takes; None = it was refused."""
    begin = time.perf_counter()
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    try:
        body = json.dumps({"prompt": "Hello", "max_tokens": 1})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return time.perf_counter() - begin if answer.status == 200 else None
    finally:
        connection.close()


def part(server: Live, kinds: list[str], seconds: float) -> dict[str, Any]:
    """One part of the attack."""
    pulse, answers = Pulse(server), []
    attackers = multiprocessing.get_context("spawn").Process(
        target=attack, args=(server.host, server.port, kinds, seconds)
    )
    attackers.start()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        answers.append(one_token(server))
        time.sleep(1.0)
    pulse.stop()
    attackers.join()
    served = [seconds for seconds in answers if seconds is not None]
    return {
        "health": pulse.take(), "one_token_longest_s": round(max(served, default=0.0), 2),
        "one_token_refused": len(answers) - len(served), "resident_mib": server.resident() >> 20,
    }  # fmt: skip


def holds(server: Live) -> dict[str, float]:
    metrics = server.metrics()
    names = ("requests_running", "requests_waiting", "kv_blocks_used", "queue_requests", "http_active")
    return {name: metrics[name] for name in names} | {"descriptors": server.descriptors()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each part")
    parser.add_argument("--json", type=Path, help="where to keep the results")
    args = parser.parse_args()
    kinds = ["slow readers", "stalled uploads", "trailers", "garbage", "600 kB prompts"]
    with live("--max-model-len", "4096", "--kv-cache-gib", "1") as server:
        part(server, ["600 kB prompts"], 3.0)  # buffers and threads that it keeps
        before, resident = holds(server), server.resident()
        results: dict[str, Any] = {"nothing": part(server, [], args.seconds)}
        for kind in kinds:
            results[kind] = part(server, [kind], args.seconds)
        results["all together"] = part(server, kinds, 2 * args.seconds)
        begin = time.monotonic()
        while (now := holds(server)) != before and time.monotonic() - begin < BACK_SECONDS:
            time.sleep(1.0)
        results["afterwards"] = {"seconds": round(time.monotonic() - begin), "before": before, "now": now,
                                 "grown_mib": (server.resident() - resident) >> 20}  # fmt: skip
    for name, found in results.items():
        print(f"{name:18}", found)
    worst = max(found["health"]["p99_ms"] for found in results.values() if "health" in found)
    print(f"p99 of /health: {worst} ms at worst (bar {BAR_MS})")
    print("everything is back" if now == before else "NOT everything is back")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
