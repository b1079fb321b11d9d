"""The life of an engine's process, and the line protocol it speaks with benchmarks/cpu.py.

    out  {"engine": "vllm 0.32.0", ...facts}                 once, when it is ready
    in   {"do": "decode", "batch": 8, "context": 128}        or {"do": "prefill", "tokens": 512}
    out  {"seconds": [0.05, ...], ...}                       of every step

One line of JSON each. A decode answers with the time of steps in which all `batch` sequences gain one token, their
contexts just above `context`; the same call again should find the context cached, and only the first pay for it. (So
servers get a prompt of context + 1 tokens: they cache whole blocks, and the last token is always computed.) A prefill
must compute its tokens anew every time.

Uses the standard library only: other engines' interpreters run it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

STEPS = 12  # measured steps per decode
ROWS = 32  # most sequences
SHORT, LONG = 128, 4096  # contexts
PREFILL = 512

Answer = dict[str, Any]


def prompt(number: int, length: int) -> list[int]:
    """Token ids of sequence `number`; no two share a beginning."""
    return [1000 + (number * 7919 + position * 104729) % 30000 for position in range(length)]


def serve(load: Callable[[], Any]) -> None:
    """Answer commands until standard input ends.

    Args:
        load: makes the engine: an object with `facts()`, `decode(batch, context)`, `prefill(tokens)` and whatever else
            is asked of it, all returning an `Answer`.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print must not come between the answers
    engine = load()

    def answer(content: Answer) -> None:
        print(json.dumps(content), file=answers, flush=True)

    answer(engine.facts())
    for line in sys.stdin:
        command = json.loads(line)
        answer(getattr(engine, command.pop("do"))(**command))


def cores(threads: int) -> list[int]:
    """The cores that `threads` threads are to be bound to."""
    return sorted(os.sched_getaffinity(0))[:threads]


def timed_steps(step: Callable[[], int], batch: int) -> list[float]:
    """Seconds of `STEPS` steps that gave every sequence a token, after one that did.

    Args:
        step: runs the engine once -> how many sequences gained a token; negative = the engine has nothing left to do.
    """
    seconds: list[float] = []
    began = False
    while len(seconds) < STEPS:
        begin = time.perf_counter()
        gained = step()
        if gained < 0:
            break
        if began and gained == batch:
            seconds.append(time.perf_counter() - begin)
        began = began or gained == batch
    return seconds
