"""Our kernels beside a build of llama.cpp on the same file, in interleaved pairs: wall and processor time per token.

    HEADWAY_PEER_LLAMA_CPP_BUILD=PROGRAM python benchmarks/pairs.py [--models gemma,...] [--points "decode 1,..."]
        [--rounds R] [--peer "llama.cpp build"] [--threads N] [--cache FOLDER] [--gemma FILE] [--out FILE]

What `cpu.py` does for every bar in an hour this does for a few points in seconds: both engines stay loaded, take turns
(ours first in every other round), and a ratio is the median over pairs of runs that follow each other. Processor time
is the whole process's, all threads together, so that it says what a step costs where other jobs share the machine; an
engine whose threads spin while they wait pays for that. `peers/README.md` has the commands that build the peer.

`--out` keeps what it holds of other models and points, so a report may be filled in parts; its `command` is the last.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cpu import SUBJECTS, chosen, gemma_file, machine
from headway.engine.machine import usable_cores
from headway.model.source import DEFAULT_MODEL, cache_folder, resolve
from headway.ops.native.backend import NativeBackend
from peers.bars import POINTS, RATIO_BARS, Point
from peers.engines import Engine, start_headway, start_peer
from peers.mixtures import MIXTURES, mixture

MODELS = {name: SUBJECTS[name] for name in ("smollm2", "gemma", "moe-q4_k", "moe-q8_0", "latent")}
Pair = dict[str, dict[str, float]]


def processor_seconds(engine: Engine) -> float:
    """Of the engine's process until now, all threads."""
    fields = Path(f"/proc/{engine.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run(engine: Engine, point: Point) -> dict[str, float]:
    """Milliseconds of the median step and processor time of the mean one, both per step."""
    begin = processor_seconds(engine)
    if point.batch:
        seconds = engine.ask("decode", batch=point.batch, context=point.context)["seconds"]
    else:
        seconds = engine.ask("prefill", tokens=point.context)["seconds"]
    spent = (processor_seconds(engine) - begin) / len(seconds)
    return {"wall_ms": round(1e3 * statistics.median(seconds), 3), "processor_ms": round(1e3 * spent, 3)}


def compared(model: str, point: Point, pairs: list[Pair]) -> dict[str, Any]:
    """A point's line of the report: medians, ratios by wall and by processor time, and what they are medians of."""
    row: dict[str, Any] = {"bar": RATIO_BARS[model]["the same file"].get(point.name)}
    for who in ("ours", "theirs"):
        step = statistics.median(pair[who]["wall_ms"] for pair in pairs)
        row[f"{who}_tokens_per_s"] = float(f"{1e3 * point.tokens / step:.4g}")
    for kind in ("wall", "processor"):
        ratios = [pair["theirs"][f"{kind}_ms"] / pair["ours"][f"{kind}_ms"] for pair in pairs]
        row[f"{kind}_ratio"] = round(statistics.median(ratios), 3)
        row[f"{kind}_ratios"] = [round(ratio, 2) for ratio in ratios]
    return row | {"pairs": pairs}


def measured(
    model: str, points: list[Point], ours: Engine, theirs: Engine, rounds: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and line of the report, point by point."""
    for point in points:
        for engine in (ours, theirs):
            run(engine, point)  # fills the cache, warms up
        pairs: list[Pair] = []
        for number in range(rounds):
            turn = (("ours", ours), ("theirs", theirs))
            pairs.append({who: run(engine, point) for who, engine in (turn if number % 2 == 0 else turn[::-1])})
        row = compared(model, point, pairs)
        print(
            f"{model:9} {point.name:15} {row['ours_tokens_per_s']:8} {row['theirs_tokens_per_s']:8} tokens/s, "
            f"ratio {row['wall_ratio']:.2f} by wall, {row['processor_ratio']:.2f} by processor time"
            + (f"; bar {row['bar']}" if row["bar"] else ""),
            flush=True,
        )
        yield point.name, row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gemma,moe-q4_k,moe-q8_0,latent", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--points", default="decode 1,decode 8,decode 32,prefill 512", help=f"of {', '.join(POINTS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", default="llama.cpp build")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--cache", default=str(cache_folder() / "benchmarks"), help="folder of the made checkpoints")
    parser.add_argument("--gemma", default="", help="Gemma 3 270M's GGUF; without it, its package is asked")
    parser.add_argument("--out", default="")
    arguments = parser.parse_args()
    points = chosen(arguments.points, POINTS)
    out = Path(arguments.out) if arguments.out else None
    report: dict[str, Any] = json.loads(out.read_text()) if out and out.exists() else {"models": {}}
    report["machine"] = machine(NativeBackend(arguments.threads))
    report["command"] = shlex.join(["python", *sys.argv])
    with tempfile.TemporaryDirectory() as logs:
        for model in chosen(arguments.models, {name: name for name in MODELS}):
            subject = MODELS[model]
            if model == "smollm2":
                path = resolve(DEFAULT_MODEL)
            elif model == "gemma":
                path = Path(arguments.gemma) if arguments.gemma else gemma_file()
            else:
                assert subject.file in MIXTURES
                path = mixture(subject.file, Path(arguments.cache))
            ours = start_headway(path, arguments.threads, subject.weights, subject.group, Path(logs) / "headway")
            theirs = start_peer(arguments.peer, path, arguments.threads, {}, Path(logs) / "peer")
            found = report["models"].setdefault(model, {"peer": theirs.facts["engine"], "date": ""})
            found["date"] = time.strftime("%Y-%m-%d")
            for name, row in measured(model, points, ours, theirs, arguments.rounds):
                found.setdefault("points", {})[name] = row
                if out:
                    out.write_text(json.dumps(report) + "\n")
            for engine in (ours, theirs):
                engine.close()


if __name__ == "__main__":
    main()
