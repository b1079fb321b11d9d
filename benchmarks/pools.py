"""Do streams flow more evenly where long prompts are computed elsewhere? Real servers of the built-in model.

    python benchmarks/pools.py [--seconds 40] [--json benchmarks/data/pools.json]

Two servers of one thread each, first as two equal replicas, then as one that computes prompts and one that answers;
several rounds in turns. Four streams are read all the while, and a prompt that nobody has seen comes whenever the one
before is answered. Bar: p99 of the streams' gaps in the pools at most half of the equal replicas'.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np

from live_server import Live

KINDS = {"mixed": ("--replicas", "2"), "pools": ("--prefill", "1", "--decode", "1")}
STREAMS, STREAM_TOKENS = 4, 400
BAR = 0.5


async def load(url: str, seconds: float, prompt_tokens: int, seed: int) -> tuple[list[float], list[float]]:
    """-> (gaps of the streams, times to first token of the long prompts), seconds."""
    gaps: list[float] = []
    firsts: list[float] = []
    end = time.perf_counter() + seconds
    draw = random.Random(seed)

    async def ask(client: httpx.AsyncClient, prompt: list[int], most: int) -> list[float]:
        """When each piece of an answer came."""
        body = {"model": "demo", "prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True,
                "stream": True}  # fmt: skip
        times = [time.perf_counter()]
        async with client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
        return times

    async def stream(client: httpx.AsyncClient) -> None:
        while time.perf_counter() < end:
            times = await ask(client, [draw.randrange(100, 40_000) for _ in range(20)], STREAM_TOKENS)
            gaps.extend(np.diff(times[1:]).tolist())

    async def long(client: httpx.AsyncClient) -> None:
        while time.perf_counter() < end:
            times = await ask(client, [draw.randrange(100, 40_000) for _ in range(prompt_tokens)], 2)
            firsts.append(times[1] - times[0])

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        await asyncio.gather(long(client), *(stream(client) for _ in range(STREAMS)))
    return gaps, firsts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="where to keep the results")
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in KINDS}
    for number in range(args.rounds):
        for name, options in KINDS.items():
            server = Live("demo", "--threads", "1", "--max-model-len", "4096", *options)
            try:
                asyncio.run(load(f"http://{server.host}:{server.port}", 3.0, 300, 1000 + number))  # all is warm
                url = f"http://{server.host}:{server.port}"
                gaps, firsts = asyncio.run(load(url, args.seconds, args.prompt_tokens, number))
            finally:
                server.stop()
            p50, p99 = (1e3 * float(np.quantile(gaps, q)) for q in (0.5, 0.99))
            found[name].append(
                {
                    "gaps": len(gaps), "p50_ms": round(p50, 1), "p99_ms": round(p99, 1), "long_prompts": len(firsts),
                    "long_ttft_p50_s": round(float(np.median(firsts)), 2),
                }
            )  # fmt: skip
            print(name, found[name][-1], flush=True)
    mixed, pools = (float(np.median([one["p99_ms"] for one in found[name]])) for name in KINDS)
    print(f"p99 of gaps: {pools / mixed:.2f} times that of equal replicas (bar {BAR})")
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")


if __name__ == "__main__":
    main()
