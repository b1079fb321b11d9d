"""Memory as it is measured: loading holds the packed weights once, and steps take what the plan says they take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from headway.ops import native

MB = 1 << 20
LAYERS = 24

START = """
import sys
from pathlib import Path
import numpy as np
from headway.model.load import load
from headway.ops.native.backend import NativeBackend
from headway.ops.protocol import CacheLayout, GroupBatch, StepBatch

def status(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024
"""
LOAD = (
    START
    + """
backend = NativeBackend(threads=2)
before = status("VmRSS")
model = load(sys.argv[1], backend)
print(status("VmHWM") - before, backend.weight_bytes)
"""
)
STEPS = (
    START
    + """
def threads():
    return len(list(Path("/proc/self/task").iterdir()))

others = threads()
CHUNKS = [int(word) for word in sys.argv[2:]]
BLOCK, BLOCKS = 8, -(-sum(CHUNKS) // 8)
backend = NativeBackend(threads=2)
model = load(sys.argv[1], backend)
groups, logits = model.shape.groups, 32
backend.allocate(CacheLayout(groups, (1,), BLOCK))
step = backend.compile(model.forward).step_bytes(max(CHUNKS), 1, logits, sum(CHUNKS), sum(CHUNKS))
cache = backend.block_bytes(groups[0], BLOCK) * BLOCKS
before = status("VmRSS")
backend.allocate(CacheLayout(groups, (BLOCKS,), BLOCK))
program = backend.compile(model.forward)
start = 0
for count in CHUNKS:
    at = np.arange(start, start + count, dtype=np.int32)
    start += count
    rows = min(logits, count)
    view = GroupBatch(np.arange(BLOCKS, dtype=np.int32)[None], at.astype(np.int64))
    ends = np.array([start], np.int32), (view,), np.arange(count - rows, count, dtype=np.int32), np.zeros(1, np.int32)
    program.run(StepBatch(at % 100, at, np.array([0, count], np.int32), *ends))
print(status("VmHWM") - before, step, cache)
backend.close()
del program
print(status("VmRSS") - before, threads() - others)
"""
)


def write(path: Path, layers: int = LAYERS, d: int = 512, heads: int = 8, head: int = 64, kv_heads: int = 8) -> None:
    """A model of random Q8_0; as it stands of 120 MB, its largest tensor 4."""
    writer = gguf.GGUFWriter(path, "llama")
    inner, vocab, q, kv = 2048, 8000, heads * head, kv_heads * head
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(d)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(vocab)])
    block = np.frombuffer(np.float16(0.001).tobytes() + bytes(range(32)), np.uint8)

    def tensor(name: str, out: int, inputs: int) -> None:
        data = np.tile(block, (out, inputs // 32))
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    tensor("token_embd.weight", vocab, d)
    writer.add_tensor("output_norm.weight", np.ones(d, np.float32))
    for layer in range(layers):
        for name, out, inputs in (("q", q, d), ("k", kv, d), ("v", kv, d), ("output", d, q)):
            tensor(f"blk.{layer}.attn_{name}.weight", out, inputs)
        for name in ("ffn_gate", "ffn_up"):
            tensor(f"blk.{layer}.{name}.weight", inner, d)
        tensor(f"blk.{layer}.ffn_down.weight", d, inner)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(d, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measured(code: str, path: Path, *args: int) -> list[int]:
    command = [sys.executable, "-c", code, str(path), *map(str, args)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_while_loading_is_the_packed_weights_and_little_more(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf")
    peak, weights = measured(LOAD, tmp_path / "model.gguf")
    assert weights > 80 * MB
    assert peak < 1.15 * weights


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("sizes", "chunks"),
    [  # small blocks of narrow heads: mostly padding; queries far wider than the model
        ({"layers": 24, "d": 256, "heads": 8, "head": 8, "kv_heads": 8}, (512, 512, 512, 7, 1, 1)),
        ({"layers": 1, "d": 64, "heads": 1024, "head": 8, "kv_heads": 1}, (512, 512, 7, 1, 1)),
    ],
    ids=["padding", "many query heads"],
)
def test_steps_and_cache_take_what_the_backend_says(
    tmp_path: Path, sizes: dict[str, int], chunks: tuple[int, ...]
) -> None:
    """Of what it says a fifth is room to grow; pages are touched in whole, and numpy and the allocator keep some."""
    write(tmp_path / "model.gguf", **sizes)
    peak, step, cache, left, workers = measured(STEPS, tmp_path / "model.gguf", *chunks)
    assert 0.6 * (step + cache) - 8 * MB < peak < step + cache + 8 * MB
    assert left < 0.2 * peak + 8 * MB and workers == 0  # closed: its buffers and threads are gone
