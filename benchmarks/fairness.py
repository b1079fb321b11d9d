"""Short prompts beside long ones, and a long one beside short ones, on the real engine with the built-in model.

    python benchmarks/fairness.py [--json benchmarks/data/fairness.json]

1. A 20-token prompt each second beside four running streams; then with two clients as well that send prompts of 90 % of
   the context back to back. Bars: p95 of the short prompts' time to first token at most 5 times what it was, the
   streams' longest gap (p99.5) at most 3 times their usual one.
2. Twenty 20-token prompts a second without end beside one prompt of 90 % of the context. Bar: it is done within 3 times
   its time alone.

In process: what is measured is the scheduler's doing, not HTTP. The same loads are laws in virtual time:
tests/scheduling/test_fairness.py.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway import LLM, SamplingParams
from headway.core.errors import Rejected
from headway.engine.build import build_engine
from headway.engine.engine import Engine
from headway.engine.messages import Delta
from headway.engine.results import Completion
from headway.engine.warmup import settle

SHORT, STREAMS, LONG_CLIENTS = 20, 4, 2
STREAM_TOKENS = 256
PATIENCE = 600.0  # seconds for the streams to begin


class Served(LLM):
    """An engine whose steps are short and whose memory is mapped, as a server's: somebody reads its streams."""

    def _build(self, progress: Any) -> Engine:
        engine = build_engine(self.options, progress, serves=True)
        for _ in settle(engine.loop.executor, engine.pacing):
            pass
        return engine


class Load:
    """Requests of several clients on one engine, driven by this thread.

    Args:
        stream_prompt: tokens of the prompts that streams begin with.
    """

    def __init__(self, llm: LLM, seed: int = 0, stream_prompt: int = SHORT) -> None:
        self._llm = llm
        self._stream_prompt = stream_prompt
        self._random = random.Random(seed)
        self._ids = itertools.count()
        self.vocab = llm.engine.info.vocab_size
        self.long = int(0.9 * llm.engine.max_model_len)
        self._held: dict[int, Completion] = {}
        self.ttft: list[float] = []  # of short prompts, s
        self.gaps: list[float] = []  # of streams, s
        self.begun = 0  # streams that had a token
        self.long_seconds: list[float] = []
        self.refused = 0  # short prompts, by a full queue

    def prompt(self, length: int) -> list[int]:
        """Tokens that no other prompt shares."""
        return [self._random.randrange(100, self.vocab) for _ in range(length)]

    def ask(self, length: int, tokens: int, on_delta: Any) -> int:
        number = next(self._ids)
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        self._held[number] = self._llm.submit(self.prompt(length), params, on_delta)
        return number

    def short(self) -> None:
        asked = time.perf_counter()
        first = True

        def heard(delta: Delta) -> None:
            nonlocal first
            if first and delta.tokens:
                self.ttft.append(time.perf_counter() - asked)
                first = False

        try:
            self.ask(SHORT, 2, heard)
        except Rejected:  # more come than this machine can serve
            self.refused += 1

    def stream(self) -> int:
        last = None

        def heard(_: Delta) -> None:
            nonlocal last
            now = time.perf_counter()
            if last is None:
                self.begun += 1
            else:
                self.gaps.append(now - last)
            last = now

        return self.ask(self._stream_prompt, STREAM_TOKENS, heard)

    def long_prompt(self) -> int:
        asked = time.perf_counter()

        def heard(delta: Delta) -> None:
            if delta.finish is not None:
                self.long_seconds.append(time.perf_counter() - asked)

        return self.ask(self.long, 1, heard)

    @property
    def idle(self) -> bool:
        return all(completion.done for completion in self._held.values())

    def turn(self) -> None:
        self._llm.turn()

    def run(self, seconds: float, *, streams: int, longs: int, rate: float, until_long: bool = False) -> None:
        """For so long, or until the first long prompt is done: keep `streams` and `longs` going, short prompts at
        `rate` per second. The time begins, and the others come, when all streams have begun."""
        wanted = {self.stream: streams, self.long_prompt: longs}
        live: dict[Any, set[int]] = {start: set() for start in wanted}
        sent = 0
        for _ in range(streams):
            live[self.stream].add(self.stream())
        late = time.perf_counter() + PATIENCE
        while self.begun < streams and time.perf_counter() < late:
            self._llm.turn()
        begin = time.perf_counter()
        while (now := time.perf_counter() - begin) < seconds and not (until_long and self.long_seconds):
            for start, count in wanted.items():
                live[start] = {number for number in live[start] if not self._held[number].done}
                while len(live[start]) < count and not (until_long and self.long_seconds):
                    live[start].add(start())
            while sent < now * rate:
                sent += 1
                self.short()
            self._llm.turn()
        for completion in self._held.values():
            self._llm.cancel(completion)
        self._held.clear()
        self._llm.turn()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each part of the first load")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--json", type=Path, help="where to keep the results")
    args = parser.parse_args()
    with Served(max_model_len=args.max_model_len, max_rows=16) as llm:
        print("steps:", llm.engine.pacing.text)
        alone, mixed = Load(llm, 1), Load(llm, 2)
        alone.run(args.seconds, streams=STREAMS, longs=0, rate=1.0)
        mixed.run(args.seconds, streams=STREAMS, longs=LONG_CLIENTS, rate=1.0)
        calm, busy = Load(llm, 3), Load(llm, 4)
        calm.run(600, streams=0, longs=1, rate=0.0, until_long=True)
        busy.run(600, streams=0, longs=1, rate=20.0, until_long=True)
    ttft = [float(np.quantile(load.ttft, 0.95)) for load in (alone, mixed)]
    usual, longest = float(np.median(alone.gaps)), [float(np.quantile(load.gaps, 0.995)) for load in (alone, mixed)]
    long = [load.long_seconds[0] for load in (calm, busy)]
    results: dict[str, Any] = {
        "short_ttft_p95_s": ttft,
        "short_prompts": [len(load.ttft) for load in (alone, mixed)],
        "stream_gap_usual_s": usual,
        "stream_gap_longest_s": longest,
        "long_prompts_done_beside": len(mixed.long_seconds),
        "long_s": long,
        "short_ttft_p95_beside_long_s": float(np.quantile(busy.ttft, 0.95)),
        "short_refused_beside_long": busy.refused,
    }
    for name, value in results.items():
        print(f"{name:32}", value)
    print(f"short prompts: p95 of TTFT {ttft[1] / ttft[0]:.2f} times (bar 5)")
    print(f"streams: longest gap {longest[1] / usual:.2f} times the usual one (bar 3; alone {longest[0] / usual:.2f})")
    print(f"long prompt: {long[1] / long[0]:.2f} times (bar 3)")
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")


if __name__ == "__main__":
    main()
