"""Predicted beside measured speed of whole models on this machine: is the step-time model within 15 %?

    python benchmarks/predict.py [--threads N] [--context T] [--json] MODEL.gguf ...

Per model: what `headway doctor` does, with its fits made now on made-up models (no step of the model itself is fitted),
then real decode steps at batch 1, 8 and 32 and a prefill of 512, each between two probes of memory and arithmetic.
Without a file the built-in model is taken. Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import sys

import msgspec

from headway.engine.machine import usable_cores
from headway.measure.checkup import checkup


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL.gguf")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = []
    for model in arguments.models or [None]:
        report = checkup(model, arguments.context, arguments.threads, "auto")
        found.append(report)
        for one in [*report.decode, report.prefill]:
            print(f"{report.model:32} {one.point:8} {one.batch:3}  {one.text()}", file=sys.stderr, flush=True)
    if arguments.json:
        command = f"python benchmarks/predict.py --context {arguments.context} --json MODEL.gguf ..."
        print(json.dumps({"command": command, "models": msgspec.to_builtins(found)}, indent=1))


if __name__ == "__main__":
    main()
