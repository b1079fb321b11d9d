"""Peak memory and time to ready of a loaded model, against the bar: at most weights + KV cache + 15 %.

    python benchmarks/memory.py [--json] [--models smollm2,1b-q4_0,...]

Per model a process of its own loads it, fills a cache of 1024 tokens in chunks of 512, and decodes. Printed: peak
resident memory less what the process had before loading (interpreter, libraries, the file's header with its
vocabulary: stated apart), over the bytes of packed weights and cache; and the seconds to load: first, and again with
quantised weights kept on disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from cpu import SUBJECTS, Subject
from headway.engine.machine import usable_cores
from headway.model.load import describe, load
from headway.model.source import DEFAULT_MODEL, resolve
from headway.ops.native.backend import NativeBackend
from headway.ops.protocol import CacheLayout, GroupBatch, StepBatch
from headway.shape.model import kv_bytes
from peers.checkpoints import gguf_file

BLOCK, TOKENS, CHUNK, STEPS = 32, 1024, 512, 8
BAR = 1.15


def resident(field: str) -> int:
    """Bytes, of a line of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def step(first: int, count: int, vocab: int, groups: int) -> StepBatch:
    """Tokens [first, first + count) of one sequence, which owns all blocks in order."""
    positions = np.arange(first, first + count, dtype=np.int32)
    table = np.arange((TOKENS + STEPS) // BLOCK + 1, dtype=np.int32)[None]
    return StepBatch(
        ids=positions % (vocab - 1),
        positions=positions,
        query_start=np.array([0, count], np.int32),
        kv_len=np.array([first + count], np.int32),
        groups=(GroupBatch(table, positions.astype(np.int64)),) * groups,
        logit_index=np.array([count - 1], np.int32),
        adapter=np.zeros(1, np.int32),
    )


def work(path: Path, subject: Subject, cache: Path) -> dict[str, Any]:
    """Load and serve, in this process."""
    described = describe(path)
    base = resident("VmRSS")
    del described  # loading makes another one in the same memory
    began = time.perf_counter()
    backend = NativeBackend(usable_cores(), weights=subject.weights, group=subject.group, pack_cache=cache)
    model = load(path, backend)
    seconds, loaded = time.perf_counter() - began, resident("VmHWM")
    blocks = (TOKENS + STEPS) // BLOCK + 1
    backend.allocate(CacheLayout(model.shape.groups, (blocks,) * len(model.shape.groups), BLOCK))
    program = backend.compile(model.forward)
    spans = [(first, CHUNK) for first in range(0, TOKENS, CHUNK)] + [(TOKENS + n, 1) for n in range(STEPS)]
    for first, count in spans:
        program.run(step(first, count, model.info.vocab_size, len(model.shape.groups)))
    kv = int(kv_bytes(model.shape.groups, blocks * BLOCK))
    peak = resident("VmHWM")
    return {
        "base_mb": base / 1e6,
        "weights_mb": backend.weight_bytes / 1e6,
        "kv_mb": kv / 1e6,
        "peak_loading_mb": loaded / 1e6,
        "peak_mb": peak / 1e6,
        "ratio": (peak - base) / (backend.weight_bytes + kv),
        "bar": BAR,
        "load_seconds": seconds,
        "from_pack_cache_mb": backend.pack_cache_bytes[0] / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", default=",".join(SUBJECTS))
    parser.add_argument("--files", type=Path, help="folder with the large files; default: made, and removed at the end")
    parser.add_argument("--worker", nargs=3, metavar=("PATH", "MODEL", "CACHE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        path, key, cache = arguments.worker
        print(json.dumps(work(Path(path), SUBJECTS[key], Path(cache))))
        return
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for key in arguments.models.split(","):
            kind = SUBJECTS[key].file
            path = resolve(DEFAULT_MODEL) if kind == "smollm2" else (arguments.files or Path(folder)) / f"{kind}.gguf"
            if not path.exists():
                gguf_file(path, kind)
            for _ in range(1 if SUBJECTS[key].weights == "stored" else 2):
                command = [sys.executable, __file__, "--worker", str(path), key, f"{folder}/packed"]
                found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                results.append({"model": key} | {name: round(value, 3) for name, value in found.items()})
                print(row(results[-1]), file=sys.stderr if arguments.json else sys.stdout, flush=True)
    if arguments.json:
        print(json.dumps(results))


def row(result: dict[str, Any]) -> str:
    kept = f", {result['from_pack_cache_mb']:.0f} MB of it from the disk's packed form" * (
        result["from_pack_cache_mb"] > 0
    )
    return (
        f"{result['model']:8} peak {result['peak_mb']:6.0f} MB - base {result['base_mb']:.0f} = "
        f"{result['ratio']:.2f} x (weights {result['weights_mb']:.0f} + KV {result['kv_mb']:.0f}), bar {BAR}; "
        f"ready in {result['load_seconds']:.2f} s{kept}"
    )


if __name__ == "__main__":
    main()
