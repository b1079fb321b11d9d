"""Time to the first token of a long prompt: computed, and with its prefix on disk after a restart.

    python benchmarks/kv_disk.py [--model FILE.gguf] [--tokens 4096] [--rounds 3] [--folder FOLDER] [--json]

Each round starts an engine over an empty folder, times the first token of a prompt nobody has seen, ends the engine,
which writes its cache, and starts another, which is asked the same. Before that the files are flushed and dropped from
the page cache, as far as the system does so when asked, and must answer with the same tokens. The bar is 0.3. Medians
over rounds; `processor` is user and system time of the process, which a busy machine changes least. Last results
(SmolLM2-135M, 2 vCPU x86-64 container, 3 rounds):

    first token of 4096 tokens       seconds  processor
    computed                           8.926     17.400
    loaded                             0.338      0.312
    loaded / computed                  0.038      0.018
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from headway import LLM, SamplingParams


def ask(model: str | None, folder: Path, prompt: list[int]) -> tuple[dict[str, float], tuple[int, ...]]:
    """One engine's life: (figures of its first token, the tokens)."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLM(model, max_model_len=len(prompt) + 64, max_rows=1, kv_disk=folder, kv_disk_gib=4) as llm:
        llm.generate([prompt[:1]], params)  # the first step of an engine is slower
        begin, used = time.perf_counter(), time.process_time()
        stream = llm.stream(prompt, SamplingParams(temperature=0, max_tokens=1))
        for _ in stream:
            break
        figures = {"seconds": time.perf_counter() - begin, "processor": time.process_time() - used}
        (completion,) = llm.generate([prompt], params)
        figures["cached"] = stream.completion.cached_tokens
        return figures, tuple(completion.choices[0].tokens)


def forget(folder: Path) -> None:
    """Have files on the disk alone."""
    for path in folder.glob("*/*.kv"):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the disk to measure is; default: that of temporary files")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rounds = []
    for number in range(arguments.rounds):
        prompt = np.random.default_rng(number).integers(1000, 40000, arguments.tokens + 8).tolist()
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            computed, answer = ask(arguments.model, Path(folder), prompt)
            forget(Path(folder))
            loaded, same = ask(arguments.model, Path(folder), prompt)
        assert answer == same and not computed["cached"] and loaded["cached"] >= arguments.tokens - 32
        rounds.append({"computed": computed, "loaded": loaded})
    medians = {
        kind: {name: statistics.median(one[kind][name] for one in rounds) for name in ("seconds", "processor")}
        for kind in ("computed", "loaded")
    }
    if arguments.json:
        print(json.dumps({"tokens": arguments.tokens, "rounds": rounds, "medians": medians}))
        return
    print(f"{'first token of ' + str(arguments.tokens) + ' tokens':<30} {'seconds':>9} {'processor':>10}")
    for kind, row in medians.items():
        print(f"{kind:<30} {row['seconds']:>9.3f} {row['processor']:>10.3f}")
    ratios = [medians["loaded"][name] / medians["computed"][name] for name in ("seconds", "processor")]
    print(f"{'loaded / computed':<30} {ratios[0]:>9.3f} {ratios[1]:>10.3f}")


if __name__ == "__main__":
    main()
