"""Are streams' gaps within the step budget, whatever the context? On the real engine with the built-in model.

    python benchmarks/step_budget.py [--seconds 20] [--json benchmarks/data/step_budget.json]

At each context: four streams whose prompts are that long, first alone, then beside two clients that send prompts of
90 % of the context back to back. The budget is the engine's default (or `--step-ms`): so many milliseconds, or twice
(`stretch`) what decodes take alone, where that is longer. Bar: p99 of the streams' gaps at most 1.25 times the budget
at every context; beside it, how far p99 of the gaps is above their median without anybody else, which no budget
changes. Also: how much longer the very first answer takes than the second, and the longest step of a prompt that fills
the context alone, with where in the prompt it happened.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fairness import LONG_CLIENTS, STREAMS, Load, Served

BAR = 1.25


def answer_seconds(load: Load) -> float:
    """Of one short prompt, alone."""
    load.short()
    while not load.idle:
        load.turn()
    return load.ttft[-1]


def longest_step(load: Load) -> dict[str, Any]:
    """Of a prompt of 90 % of the context, alone: ms of its steps, and how much of it was done before the longest."""
    number, steps = load.long_prompt(), []
    while not load.idle:
        begin = time.perf_counter()
        load.turn()
        steps.append(1e3 * (time.perf_counter() - begin))
    del number
    worst = int(np.argmax(steps))
    return {"median_ms": round(float(np.median(steps)), 1), "longest_ms": round(float(steps[worst]), 1),
            "at": f"step {worst + 1} of {len(steps)}"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each context")
    parser.add_argument("--contexts", default="128,1024,2048,4096,7000")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--step-ms", type=float, help="the budget; default: the engine's own")
    parser.add_argument("--json", type=Path, help="where to keep the results")
    args = parser.parse_args()
    with Served(max_rows=16, step_ms=args.step_ms, max_model_len=args.max_model_len) as llm:
        budget = llm.engine.pacing.budget
        print("steps:", llm.engine.pacing.text)
        gc.freeze()  # as the server's engine process does
        results: dict[str, Any] = {
            "budget_ms": budget.milliseconds, "stretch": budget.stretch, "step_times": llm.engine.step_times,
        }  # fmt: skip
        first = Load(llm, 1)
        results["first_answers_ms"] = [round(1e3 * answer_seconds(first), 1) for _ in range(3)]
        results["long_prompt_alone"] = [longest_step(Load(llm, seed)) for seed in (2, 3)]
        for context in map(int, args.contexts.split(",")):
            calm, load = (Load(llm, context + seed, stream_prompt=context) for seed in (0, 1))
            calm.run(args.seconds / 4, streams=STREAMS, longs=0, rate=0.0)
            alone = 1e3 * float(np.median(calm.gaps))
            wanted = max(budget.milliseconds or 0.0, budget.stretch * alone)
            load.run(args.seconds, streams=STREAMS, longs=LONG_CLIENTS, rate=0.0)
            gaps = 1e3 * np.array(load.gaps)
            figures = [*map(float, np.quantile(gaps, (0.5, 0.99))), float(gaps.max())] if len(gaps) else [math.nan] * 3
            results[f"context_{context}"] = {
                "alone_ms": round(alone, 1), "alone_p99_ms": round(1e3 * float(np.quantile(calm.gaps, 0.99)), 1),
                "budget_ms": round(wanted, 1), "gaps": len(gaps), "p50_ms": round(figures[0], 1),
                "p99_ms": round(figures[1], 1), "longest_ms": round(figures[2], 1),
                "of_budget": round(figures[1] / wanted, 2), "long_prompts_done": len(load.long_seconds),
            }  # fmt: skip
    for name, value in results.items():
        print(f"{name:24}", value)
    worst = np.nanmax([found["of_budget"] for name, found in results.items() if name.startswith("context_")])
    print(f"p99 of gaps: {worst:.2f} times the budget at worst (bar {BAR})")
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")


if __name__ == "__main__":
    main()
