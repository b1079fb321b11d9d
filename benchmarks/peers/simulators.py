"""Another public simulator beside ours: Vidur (`pip install vidur`, in an environment of its own), the same requests,
steps that take the same time, and what each says of them.

    python benchmarks/peers/simulators.py --python vidur/bin/python --trace AzureLLMInferenceTrace_conv.csv

Requests come one after another from the trace, at Poisson times. Vidur's wheel has no profiles of devices, so both are
told what a step takes; `with_vidur.py` does that and nothing else. CPU seconds, for other work on the machine does not
count in them. They agree within half a per cent; at 12 requests a second the machine is full. Last results (2 vCPU
x86-64 container full of other work; 2,000 requests):

                                CPU s  requests/CPU min  mean TTFT ms  mean E2E ms
    headway, 4 requests/s        0.15           823,865         88.43       2526.6
    vidur, 4 requests/s         14.78             8,119         88.33       2527.0
    headway, 12 requests/s       0.12         1,028,697       2057.35      17899.7
    vidur, 12 requests/s         5.65            21,257       2065.64      17928.4
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from headway.core.step import Capabilities
from headway.engine.references import load_device, load_shape
from headway.roofline.fixed import FixedCosts
from headway.scheduling.budget import Budget
from headway.simulate.arrivals import Arrivals
from headway.simulate.deploy import EngineSetup, deployed
from headway.simulate.play import play
from headway.traffic.load import Load, timetable
from headway.traffic.traces import TraceRow, read_trace

COSTS = FixedCosts(step=6e-3, row=2e-5, token=5e-5, kv_token=2e-8)  # seconds; about a model of 8 G on a large GPU
LIMITS = Capabilities(
    block_size=32, blocks=(14_000,), windows=(None,), max_rows=256, max_tokens_per_step=2048, max_model_len=131_072
)


def ours(rows: list[TraceRow], load: Load) -> dict[str, float]:
    base = deployed(
        load_shape("llama-3.1-8b"), load_device("h100-sxm"), 1, EngineSetup(policy="fcfs", prefix_cache=False)
    )
    one = msgspec.structs.replace(base, limits=LIMITS, budget=Budget(), model=COSTS)
    begin, cpu = time.perf_counter(), time.process_time()
    summary = play(one, Arrivals(rows, load), load, detail=0).summary
    took = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - begin}
    return took | {name: summary[f"{name}_ms"]["mean"] / 1e3 for name in ("ttft", "e2e")}


def vidurs(python: str, rows: list[TraceRow], load: Load) -> dict[str, float]:
    times = timetable(load, [row.at for row in rows])
    asked: dict[str, Any] = {
        "costs": msgspec.structs.asdict(COSTS), "blocks": LIMITS.blocks[0], "block_size": LIMITS.block_size,
        "step_tokens": LIMITS.max_tokens_per_step, "rows": LIMITS.max_rows,
        "requests": [(at, row.input_tokens, row.output_tokens) for at, row in zip(times, rows, strict=True)],
    }  # fmt: skip
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(asked, file)
        file.flush()
        script = Path(__file__).with_name("with_vidur.py")
        done = subprocess.run([python, str(script), file.name], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="of an environment with Vidur")
    parser.add_argument("--trace", type=Path, required=True, help="an Azure .csv")
    parser.add_argument("--requests", type=int, default=2000)
    args = parser.parse_args()
    rows = read_trace(args.trace, args.requests)
    print(f"{'':24} {'CPU s':>8} {'requests/CPU min':>17} {'mean TTFT ms':>13} {'mean E2E ms':>12}")
    for rate in (4.0, 12.0):
        load = Load(rate=rate)
        for name, found in (("headway", ours(rows, load)), ("vidur", vidurs(args.python, rows, load))):
            speed = 60 * len(rows) / found["cpu"]
            print(
                f"{f'{name}, {rate:g} requests/s':24} {found['cpu']:8.2f} {speed:17,.0f} {1e3 * found['ttft']:13.2f} "
                f"{1e3 * found['e2e']:12.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
