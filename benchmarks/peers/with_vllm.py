"""vLLM on the CPU, in process: scheduler, model and sampler. With zentorch installed, vLLM uses its kernels.

    python with_vllm.py FOLDER THREADS

Set up as its own documentation advises: threads bound to cores, tcmalloc and Intel's OpenMP where they are found.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.metadata
import os
import sys
import time
from pathlib import Path
from typing import Any

from worker import LONG, PREFILL, ROWS, STEPS, Answer, cores, prompt, serve, timed_steps

CACHE_GIB = 2


def preload() -> None:
    """Start this process again with the libraries vLLM wants loaded first, unless they are."""
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    malloc = ctypes.util.find_library("tcmalloc_minimal")
    wanted = ":".join(str(one) for one in (malloc, openmp if openmp.exists() else None) if one)
    if wanted and "LD_PRELOAD" not in os.environ:
        os.environ["LD_PRELOAD"] = wanted
        os.execv(sys.executable, [sys.executable, *sys.argv])


class Vllm:
    def __init__(self, path: str, threads: int) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(CACHE_GIB)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores(threads)))
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # no second process: nothing to wait for between steps
        from vllm import LLM

        self.engine = LLM(
            model=path,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=LONG + PREFILL,
            max_num_seqs=ROWS,
            enable_prefix_caching=True,
        ).llm_engine
        self.sent = 0

    def facts(self) -> Answer:
        versions = [f"vllm {importlib.metadata.version('vllm-cpu')}"]
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"zentorch {importlib.metadata.version('zentorch')}")
        return {"engine": " + ".join(versions)}

    def add(self, ids: list[int], tokens: int) -> str:
        from vllm import SamplingParams

        self.sent += 1
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompt: Any = {"prompt_token_ids": ids}
        self.engine.add_request(str(self.sent), prompt, params)
        return str(self.sent)

    def step(self) -> int:
        if not self.engine.has_unfinished_requests():
            return -1
        return len(self.engine.step())

    def prefill(self, tokens: int) -> Answer:
        begin = time.perf_counter()
        self.add(prompt(1000 + self.sent, tokens), 1)
        while self.step() >= 0:
            pass
        return {"seconds": [time.perf_counter() - begin]}

    def decode(self, batch: int, context: int) -> Answer:
        ids = [self.add(prompt(row, context + 1), STEPS + 8) for row in range(batch)]
        seconds = timed_steps(self.step, batch)
        self.engine.abort_request(ids)
        while self.step() >= 0:
            pass
        return {"seconds": seconds}


if __name__ == "__main__":
    preload()
    serve(lambda: Vllm(sys.argv[1], int(sys.argv[2])))
