"""Decode and prefill speed of the CPU kernels, beside other engines on the same file and beside the machine's roofs.

    python benchmarks/cpu.py [--quick] [--json] [--threads N] [--rounds R] [--models smollm2,1b-q4_0,...]

Each engine lives in a process of its own and waits while another works. Per point and round: probe, ours, probe,
theirs, probe. A shared machine's memory bandwidth changes within seconds, so only two things mean anything: the ratio
of runs that follow each other, and the share of the roof measured right before and after. Medians over rounds.

    roof = tokens / max(bytes of weights and cache / bandwidth, operations / arithmetic rate)

`--json` prints every comparison as {"ours", "peer", "ratio", "bar"}; ratio is null where the peer is not installed
(`pip install '.[peers]'`). `--quick` runs the small model and one size of the large one, in under ten minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headway.engine.machine import usable_cores
from headway.model.load import load
from headway.model.source import DEFAULT_MODEL, resolve
from headway.ops import native
from headway.ops.native.backend import NativeBackend, NativeProgram
from headway.ops.protocol import CacheLayout, GroupBatch, StepBatch

BLOCK = 32
ROWS = 32  # sequences kept in the cache for decoding
CONTEXT = 128  # their length
LONG = 4096
STEPS = 12


@dataclass(frozen=True)
class Subject:
    """A model file and how we compute it.

    Attributes:
        file: "smollm2", or the storage type of the large shape.
        weights, group: of `NativeBackend`.
        quantised: the ratio bars are for quantised files; in bf16 everybody reads the same bytes.
    """

    file: str
    weights: str = "stored"
    group: int | None = None
    quantised: bool = True

    @property
    def peers(self) -> bool:
        """Whether other engines compute the same thing from the same file."""
        return self.weights == "stored"


# The large shape is Llama-3.2-1B's with a smaller vocabulary: 1.04 G parameters, random.
SUBJECTS = {
    "smollm2": Subject("smollm2"),
    "1b-q4_0": Subject("Q4_0"),
    "1b-q8_0": Subject("Q8_0"),
    "1b-int4": Subject("BF16", "int4", 128),
    "1b-int8": Subject("BF16", "int8", 128),
    "1b-bf16": Subject("BF16", quantised=False),
}
QUICK = ("smollm2", "1b-q4_0")


@dataclass(frozen=True)
class Point:
    """What is measured. bars: the least ratio to a peer on the same file, and the least share of the roof."""

    name: str
    batch: int  # sequences decoding; 0 = prefill of `context` tokens
    context: int
    ratio_bar: float | None
    share_bar: float | None


POINTS = (
    Point("decode 1", 1, CONTEXT, 1.2, 0.7),
    Point("decode 4", 4, CONTEXT, None, None),
    Point("decode 8", 8, CONTEXT, 2.0, None),
    Point("decode 32", 32, CONTEXT, 2.5, 0.75),
    Point("prefill 512", 0, 512, 2.0, 0.75),
    Point("decode 1 at 4k", 1, LONG, 1.8, None),
)


class Ours:
    """Headway's native backend, driven without scheduler and sampler."""

    def __init__(self, path: Path, subject: Subject, threads: int) -> None:
        self.backend = NativeBackend(threads, weights=subject.weights, group=subject.group)
        model = load(path, self.backend)
        self.shape, self.vocab = model.shape, model.info.vocab_size
        per_row = (CONTEXT + STEPS) // BLOCK + 1
        self.tables = [list(range(row * per_row, (row + 1) * per_row)) for row in range(ROWS)]
        long = (LONG + STEPS) // BLOCK + 1
        self.long = list(range(ROWS * per_row, ROWS * per_row + long))
        layout = CacheLayout(model.groups, (ROWS * per_row + long,) * len(model.groups), BLOCK)
        self.backend.allocate(layout)
        self.program: NativeProgram = self.backend.compile(model.forward)  # type: ignore[assignment]
        self.filled: set[int] = set()

    def step(self, rows: list[tuple[list[int], int, int]]) -> None:
        """rows: (block table, first position, tokens)."""
        counts = np.array([count for _, _, count in rows])
        positions = np.concatenate([np.arange(first, first + count) for _, first, count in rows]).astype(np.int32)
        table = np.full((len(rows), max(len(blocks) for blocks, _, _ in rows)), -1, np.int32)
        for row, (blocks, _, _) in enumerate(rows):
            table[row, : len(blocks)] = blocks
        block = table[np.repeat(np.arange(len(rows)), counts), positions // BLOCK].astype(np.int64)
        start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        view = GroupBatch(table, block * BLOCK + positions % BLOCK)
        batch = StepBatch(
            ids=((positions * 7919 + 13) % (self.vocab - 1)).astype(np.int32),
            positions=positions,
            query_start=start,
            kv_len=np.array([first + count for _, first, count in rows], np.int32),
            groups=(view,) * len(self.shape.groups),
            logit_index=start[1:] - 1,
            adapter=np.zeros(len(rows), np.int32),
        )
        self.program.run(batch)

    def prefill(self, tokens: int) -> list[float]:
        return [self._timed([(self.long, 0, tokens)])]

    def decode(self, batch: int, context: int) -> list[float]:
        tables = self.tables[:batch] if context == CONTEXT else [self.long]
        if context not in self.filled:
            for blocks in self.tables if context == CONTEXT else [self.long]:
                for first in range(0, context, 512):
                    self.step([(blocks, first, min(512, context - first))])
            self.filled.add(context)
        return [self._timed([(blocks, context + n, 1) for blocks in tables]) for n in range(STEPS)]

    def _timed(self, rows: list[tuple[list[int], int, int]]) -> float:
        begin = time.perf_counter()
        self.step(rows)
        return time.perf_counter() - begin

    def facts(self) -> dict[str, Any]:
        """Of the model on this backend, for the roof."""
        params, tied = self.shape.params, self.shape.tied
        head = params.embed if tied else params.head
        untied = 0 if tied else self.backend.weight_bytes * params.embed / params.total
        cached = sum(len(group.layers) * group.row_width * self.backend.kv_dtype_bytes for group in self.shape.groups)
        return {
            "bytes": self.backend.weight_bytes - untied,
            "cache": cached,
            "body": params.body,
            "head": head,
            "math": self.backend.math,
        }


class LlamaCpp:
    """llama.cpp through llama-cpp-python's low-level interface."""

    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp

        self.api = llama_cpp
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = ROWS * (CONTEXT + STEPS + 32) + LONG + 512 + STEPS
        params.n_batch = params.n_ubatch = 512
        params.n_seq_max = ROWS + 2
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(model, params)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)
        self.filled: set[int] = set()

    def step(self, rows: list[tuple[int, int, int]]) -> None:
        """rows: (sequence, first position, tokens)."""
        n = 0
        for sequence, first, count in rows:
            for position in range(first, first + count):
                self.batch.token[n] = (position * 7919 + 13) % 30000
                self.batch.pos[n] = position
                self.batch.n_seq_id[n] = 1
                self.batch.seq_id[n][0] = sequence
                self.batch.logits[n] = position == first + count - 1
                n += 1
        self.batch.n_tokens = n
        if self.api.llama_decode(self.context, self.batch) != 0:
            raise RuntimeError("llama_decode failed")
        self.api.llama_get_logits(self.context)  # waits for the result

    def prefill(self, tokens: int) -> list[float]:
        self.api.llama_memory_seq_rm(self.memory, ROWS + 1, 0, -1)
        begin = time.perf_counter()
        self.step([(ROWS + 1, 0, tokens)])
        return [time.perf_counter() - begin]

    def decode(self, batch: int, context: int) -> list[float]:
        sequences = list(range(batch)) if context == CONTEXT else [ROWS]
        if context not in self.filled:
            for sequence in range(ROWS) if context == CONTEXT else [ROWS]:
                for first in range(0, context, 512):
                    self.step([(sequence, first, min(512, context - first))])
            self.filled.add(context)
        times = []
        for n in range(STEPS):
            begin = time.perf_counter()
            self.step([(sequence, context + n, 1) for sequence in sequences])
            times.append(time.perf_counter() - begin)
        for sequence in sequences:
            self.api.llama_memory_seq_rm(self.memory, sequence, context, -1)
        return times


def work(engine: str, path: Path, subject: Subject, threads: int) -> None:
    """Life of an engine's process: a line of JSON in, a line of JSON out."""
    runner: Any = Ours(path, subject, threads) if engine == "headway" else LlamaCpp(path, threads)
    print(json.dumps(runner.facts() if engine == "headway" else {}), flush=True)
    for line in sys.stdin:
        batch, context = json.loads(line)
        times = runner.decode(batch, context) if batch else runner.prefill(context)
        print(json.dumps(times), flush=True)


class Engine:
    """An engine's process, from outside."""

    def __init__(self, name: str, path: Path, key: str, threads: int) -> None:
        command = [sys.executable, __file__, "--worker", name, str(path), key, "--threads", str(threads)]
        pipe, chatter = subprocess.PIPE, None if name == "headway" else subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=chatter, text=True)
        self.facts = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine's process ended with {self.process.wait()}")
        return json.loads(line)

    def seconds(self, point: Point) -> float:
        """Median of a step."""
        assert self.process.stdin is not None
        print(json.dumps([point.batch, point.context]), file=self.process.stdin, flush=True)
        return statistics.median(self._answer())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def roof(point: Point, facts: dict[str, Any], bandwidth: float, rates: dict[str, float]) -> float:
    """Tokens/s at best. A prefill's cache traffic and attention are left out, which makes the share look smaller."""
    tokens, rows = (point.batch, point.batch) if point.batch else (point.context, 1)
    read = facts["bytes"] + (facts["cache"] * point.context * rows if point.batch else 0)
    operations = 2 * (facts["body"] * tokens + facts["head"] * rows)
    return tokens / max(read / bandwidth, operations / rates[facts["math"]])


def compare(key: str, path: Path, threads: int, rounds: int, probe: NativeBackend) -> list[dict[str, Any]]:
    """All points of one subject."""
    subject = SUBJECTS[key]
    rates = {kind: probe.probe_compute(kind) for kind in ("fp32", "bf16", "int8")}
    ours = Engine("headway", path, key, threads)
    found = importlib.util.find_spec("llama_cpp") is not None and subject.peers
    theirs = Engine("llama.cpp", path, key, threads) if found else None
    results = []
    for point in POINTS:
        for engine in filter(None, (ours, theirs)):
            engine.seconds(point)  # fills the cache, warms up
        tokens = point.batch or point.context
        speeds: list[float] = []
        peers: list[float] = []
        shares: list[float] = []
        before = probe.probe_bandwidth(256 << 20, 3)
        for _ in range(rounds):
            speeds.append(tokens / ours.seconds(point))
            after = probe.probe_bandwidth(256 << 20, 3)
            shares.append(speeds[-1] / roof(point, ours.facts, (before + after) / 2, rates))
            if theirs is not None:
                peers.append(tokens / theirs.seconds(point))
                after = probe.probe_bandwidth(256 << 20, 3)
            before = after
        pairs = [a / b for a, b in zip(speeds, peers, strict=False)]
        results.append(
            {
                "model": key,
                "point": point.name,
                "ours": round(statistics.median(speeds), 1),
                "peer": round(statistics.median(peers), 1) if peers else None,
                "ratio": round(statistics.median(pairs), 3) if pairs else None,
                "bar": point.ratio_bar if subject.peers and subject.quantised else None,
                "share_of_roof": round(statistics.median(shares), 3),
                "share_bar": point.share_bar,
                "bandwidth_gb_s": round(before / 1e9, 1),
            }
        )
        print(row(results[-1]), file=sys.stderr, flush=True)
    for engine in filter(None, (ours, theirs)):
        engine.close()
    return results


def row(result: dict[str, Any]) -> str:
    def shown(value: Any, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        f"{result['model']:9} {result['point']:15} {result['ours']:9.1f} {shown(result['peer'], '9.1f'):>9} "
        f"{shown(result['ratio'], '5.2f'):>6} (bar {shown(result['bar'], '.2f'):>4})  "
        f"roof {result['share_of_roof']:5.0%} (bar {shown(result['share_bar'], '.0%'):>4})  "
        f"{result['bandwidth_gb_s']:5.1f} GB/s"
    )


def write_large(path: Path, kind: str) -> Path:
    """A GGUF of the large shape with random weights of a storage type."""
    import gguf

    layers, d, inner, heads, kv_heads, vocab = 16, 2048, 8192, 32, 8, 32000
    rng = np.random.default_rng(0)
    stored = gguf.GGMLQuantizationType[kind]
    numbers, size = gguf.GGML_QUANT_SIZES[stored]

    def random(out: int, inputs: int) -> np.ndarray:
        data = rng.integers(0, 256, (out, inputs // numbers, size), dtype=np.uint8)
        if kind == "BF16":  # about N(0, 0.02), by its exponent's byte
            data[..., 1] = (data[..., 1] & 0x80) | 0x3C
        else:
            scale = np.float16(0.02 / (4.6 if kind == "Q4_0" else 74))
            data[..., :2] = np.frombuffer(scale.tobytes(), np.uint8)
        return data.reshape(out, -1)

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(d)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(d // heads)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(vocab)])
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(2)
    shapes = {"attn_q": (d, d), "attn_k": (d // 4, d), "attn_v": (d // 4, d), "attn_output": (d, d)}
    shapes |= {"ffn_gate": (inner, d), "ffn_up": (inner, d), "ffn_down": (d, inner)}
    writer.add_tensor("token_embd.weight", random(vocab, d), raw_dtype=stored)
    writer.add_tensor("output_norm.weight", np.ones(d, np.float32))
    for layer in range(layers):
        for name, shape in shapes.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", random(*shape), raw_dtype=stored)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(d, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--models", default="")
    parser.add_argument("--worker", nargs=3, metavar=("ENGINE", "PATH", "MODEL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        engine, path, key = arguments.worker
        return work(engine, Path(path), SUBJECTS[key], arguments.threads)
    if not native.available():
        raise SystemExit(native.why_not())
    keys = arguments.models.split(",") if arguments.models else list(QUICK if arguments.quick else SUBJECTS)
    rounds = arguments.rounds or (3 if arguments.quick else 7)
    probe = NativeBackend(arguments.threads)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        files: dict[str, Path] = {"smollm2": resolve(DEFAULT_MODEL)}
        for key in keys:
            kind = SUBJECTS[key].file
            if kind not in files:
                files[kind] = write_large(Path(folder) / f"{kind}.gguf", kind)
            results += compare(key, files[kind], arguments.threads, rounds, probe)
    if arguments.json:
        print(json.dumps({"machine": {"kernels": probe.kernels, "threads": probe.threads}, "comparisons": results}))
    else:
        print("\n".join(row(result) for result in results))


if __name__ == "__main__":
    main()
