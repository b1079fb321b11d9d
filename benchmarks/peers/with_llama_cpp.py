"""llama.cpp through llama-cpp-python's low-level interface: its decode loop, without a sampler.

python with_llama_cpp.py FILE.gguf THREADS
"""

from __future__ import annotations

import sys
import time

import llama_cpp
from worker import LONG, PREFILL, ROWS, SHORT, STEPS, Answer, prompt, serve


class LlamaCpp:
    def __init__(self, path: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = ROWS * (SHORT + STEPS + 32) + LONG + PREFILL + STEPS
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = ROWS + 2
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(model, params)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)
        self.filled: set[int] = set()

    def facts(self) -> Answer:
        return {"engine": f"llama-cpp-python {llama_cpp.__version__}"}

    def step(self, rows: list[tuple[int, int, int]]) -> float:
        """Seconds of one step. rows: (sequence, first position, tokens)."""
        n = 0
        for sequence, first, count in rows:
            ids = prompt(sequence, first + count)
            for position in range(first, first + count):
                self.batch.token[n] = ids[position]
                self.batch.pos[n] = position
                self.batch.n_seq_id[n] = 1
                self.batch.seq_id[n][0] = sequence
                self.batch.logits[n] = position == first + count - 1
                n += 1
        self.batch.n_tokens = n
        begin = time.perf_counter()
        if llama_cpp.llama_decode(self.context, self.batch) != 0:
            raise RuntimeError("llama_decode failed")
        llama_cpp.llama_get_logits(self.context)  # waits for the result
        return time.perf_counter() - begin

    def prefill(self, tokens: int) -> Answer:
        llama_cpp.llama_memory_seq_rm(self.memory, ROWS + 1, 0, -1)
        return {"seconds": [self.step([(ROWS + 1, 0, tokens)])]}

    def decode(self, batch: int, context: int) -> Answer:
        """Sequence ROWS is the long one."""
        sequences = list(range(batch)) if context == SHORT else [ROWS]
        for sequence in set(sequences) - self.filled:
            for first in range(0, context, 512):
                self.step([(sequence, first, min(512, context - first))])
            self.filled.add(sequence)
        seconds = [self.step([(sequence, context + n, 1) for sequence in sequences]) for n in range(STEPS)]
        for sequence in sequences:
            llama_cpp.llama_memory_seq_rm(self.memory, sequence, context, -1)
        return {"seconds": seconds}


if __name__ == "__main__":
    serve(lambda: LlamaCpp(sys.argv[1], int(sys.argv[2])))
