"""How far the kernels' answers are from the same file dequantised and computed in float32: KL per token of a text.

python benchmarks/peers/accuracy.py [MODEL]        prints {"tokens", "mean", "percentile_99_9"}
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from headway.model.load import load
from headway.model.source import DEFAULT_MODEL
from headway.ops.native.backend import NativeBackend
from headway.ops.protocol import Backend, CacheLayout, GroupBatch, StepBatch
from headway.ops.reference import ReferenceBackend
from headway.text.tokenizer import Tokenizer

TEXT = Path(__file__).parents[1] / "data" / "text.txt"
BLOCK, CHUNK = 32, 128


class Scored:
    """Logits of a text, chunk by chunk."""

    def __init__(self, source: str, backend: Backend, tokens: int) -> None:
        self.model = load(source, backend)
        groups = self.model.shape.groups
        self.blocks = -(-tokens // BLOCK)
        backend.allocate(CacheLayout(groups, (self.blocks,) * len(groups), BLOCK))
        self.program = backend.compile(self.model.forward)

    def logits(self, ids: list[int], first: int) -> np.ndarray:
        """float64 [len(ids), vocab] of ids at positions from `first` on; what precedes must have been computed."""
        positions = np.arange(first, first + len(ids), dtype=np.int32)
        view = GroupBatch(np.arange(self.blocks, dtype=np.int32)[None], positions.astype(np.int64))
        logits = self.program.run(
            StepBatch(
                ids=np.array(ids, np.int32),
                positions=positions,
                query_start=np.array([0, len(ids)], np.int32),
                kv_len=np.array([first + len(ids)], np.int32),
                groups=(view,) * len(self.model.shape.groups),
                logit_index=np.arange(len(ids), dtype=np.int32),
                adapter=np.zeros(1, np.int32),
            )
        )
        return logits.rows.astype(np.float64)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def main() -> None:
    source = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_MODEL
    mine = NativeBackend()
    ids = Tokenizer(load(source, mine).info.tokenizer).encode(TEXT.read_text())
    native, reference = Scored(source, NativeBackend(), len(ids)), Scored(source, ReferenceBackend(), len(ids))
    divergences = []
    for first in range(0, len(ids), CHUNK):
        part = ids[first : first + CHUNK]
        want, got = log_softmax(reference.logits(part, first)), log_softmax(native.logits(part, first))
        divergences.append((np.exp(want) * (want - got)).sum(axis=-1))
    every = np.concatenate(divergences)
    result = {"tokens": len(ids), "mean": float(every.mean()), "percentile_99_9": float(np.percentile(every, 99.9))}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
