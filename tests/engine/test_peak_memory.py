"""Loading holds the packed weights once, and of the file no more than the tensor at hand."""

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

CODE = """
import sys
from pathlib import Path
from headway.model.load import load
from headway.ops.native.backend import NativeBackend

def status(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024

backend = NativeBackend(threads=2)
before = status("VmRSS")
model = load(sys.argv[1], backend)
print(status("VmHWM") - before, backend.weight_bytes)
"""


def write(path: Path) -> None:
    """A model of 120 MB of random Q8_0, its largest tensor 4."""
    writer = gguf.GGUFWriter(path, "llama")
    d, inner, vocab = 512, 2048, 8000
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(d)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(vocab)])
    block = np.frombuffer(np.float16(0.001).tobytes() + bytes(range(32)), np.uint8)

    def tensor(name: str, out: int, inputs: int) -> None:
        data = np.tile(block, (out, inputs // 32))
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    tensor("token_embd.weight", vocab, d)
    writer.add_tensor("output_norm.weight", np.ones(d, np.float32))
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensor(f"blk.{layer}.{name}.weight", d, d)
        for name in ("ffn_gate", "ffn_up"):
            tensor(f"blk.{layer}.{name}.weight", inner, d)
        tensor(f"blk.{layer}.ffn_down.weight", d, inner)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(d, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_while_loading_is_the_packed_weights_and_little_more(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf")
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "model.gguf")], check=True, capture_output=True, text=True
    )
    peak, weights = map(int, done.stdout.split())
    assert weights > 80 * MB
    assert peak < 1.15 * weights
