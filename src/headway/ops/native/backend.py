"""The backend over the compiled kernels: a family's calls become a program, a step is one call into it.

    NativeBackend().compile(family) --calls once--> NativeOps --builds--> _native.Program
    NativeProgram.run(batch)        --one call, no interpreter lock-->    logits and their summary
    NativeBackend.draw(logits, ...) --one call for all rows-->            tokens

Numbers: activations are float32 between operations. Integer weights meet activations rounded to 8 bits per token and
group of the weight's; bfloat16 weights meet activations rounded to bfloat16 where the machine multiplies those. The
cache holds bfloat16, float32, or 8 bits with a float16 scale per token and head. A row's result depends on nothing but
the row: not on its neighbours, the chunk it came in, or the number of threads.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headway.core.errors import BadInput, ModelFileError
from headway.ops import native
from headway.ops.blocks import READERS
from headway.ops.native.packed import PackCache
from headway.ops.native.program import NativeOps, NativeProgram
from headway.ops.protocol import AdapterSlots, CacheLayout, Forward, Prepared, Program
from headway.ops.registry import BackendKind, BackendSetup, register
from headway.ops.weight import GROUPS, NOT_FINITE, READABLE, Weight
from headway.sampling.adjust import Masking
from headway.sampling.logits import Logits
from headway.sampling.operations import NumpyLogits
from headway.sampling.table import Draws
from headway.shape.formats import FORMATS
from headway.shape.model import KVGroup

logger = logging.getLogger(__name__)

_TARGETS = {"stored": 0, "int8": 128, "int4": 32}  # and the default group
CACHED = ("bf16", "f32", "int8")  # how the cache may be kept; the first unless asked for
TILE, FLOAT = 32, 4  # outputs of a tile of a packed matrix; bytes
_WIDE = ("embed", "head", "gathered")  # parts that stay at 8 bits: errors here reach the logits


class NativeBackend(NumpyLogits):
    """Headway's own kernels on the CPU.

    Args:
        threads: how many compute; None = one per core this process may use.
        weights: "stored" keeps the file's precision; "int8" and "int4" quantise 16 and 32-bit matrices at load, the
            embedding and the output matrix always to 8 bits.
        group: inputs per scale when quantising: 16, 32, 64 or 128; None = 128 for int8, 32 for int4.
        kv_dtype: "bf16", "f32" or "int8", how the cache is kept.
        pack_cache: folder to keep what was quantised at load in, for the next start; None = nowhere.
        kernels: "avx512_bf16", "avx512", "avx2" or "scalar"; None = the best this machine runs.

    Raises:
        BadInput: an argument is out of range.
        ImportError: the compiled module is missing; see `native.why_not`.
    """

    name = "native"
    deterministic = True

    def __init__(
        self,
        threads: int | None = None,
        weights: str = "stored",
        group: int | None = None,
        kv_dtype: str = "bf16",
        kernels: str | None = None,
        pack_cache: Path | None = None,
    ) -> None:
        if weights not in _TARGETS:
            raise BadInput("weights", f"{weights!r} is not one of {', '.join(_TARGETS)}")
        if group not in (None, *GROUPS):
            raise BadInput("group", f"{group} is not one of {', '.join(map(str, GROUPS))}")
        if kv_dtype not in CACHED:
            raise BadInput("kv_dtype", f"{kv_dtype!r} is not one of {', '.join(CACHED)}")
        if threads is None:
            threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if not 1 <= threads <= 1024:
            raise BadInput("threads", f"{threads} is not from 1 to 1024")
        self._module = native.load()
        try:
            self._engine = self._module.Engine(threads, kernels or "", getattr(self._module.CacheFormat, kv_dtype))
        except ValueError as error:
            raise BadInput("kernels", str(error)) from None
        if self._engine.threads < threads:
            logger.warning("Only %d of %d threads could be started; they compute.", self._engine.threads, threads)
        self.kv_format = kv_dtype
        self.kv_dtype_bytes = FORMATS[kv_dtype].width
        self._weights, self._group = weights, group
        self._cache = None if pack_cache is None else PackCache(pack_cache, self._engine, f"{weights}, {group}")
        self._groups = 0
        self._bytes = dict.fromkeys(("int8", "bf16", "fp32"), 0)  # of weights, by what they are multiplied in

    @property
    def kernels(self) -> str:
        """Name of the instruction set in use."""
        return self._engine.kernels

    @property
    def build(self) -> str:
        code = Path(self._module.__file__ or "").read_bytes()
        return f"{self.kernels} {hashlib.blake2b(code, digest_size=16).hexdigest()}"

    @property
    def threads(self) -> int:
        return self._engine.threads

    @property
    def weight_bytes(self) -> int:
        return sum(self._bytes.values())

    @property
    def pack_cache_bytes(self) -> tuple[int, int]:
        """Bytes of packed weights that were (read from, written to) the disk so far."""
        return (0, 0) if self._cache is None else (self._cache.read, self._cache.written)

    @property
    def math(self) -> str:
        return max(self._bytes, key=self._bytes.__getitem__)

    def held_as(self, format: str, head: bool = False) -> str:
        """A matrix stored in `format` is held so; head: it is the output matrix."""
        target, group = self._target(format, head)
        return f"{target}/{group}" if target else format

    def _target(self, format: str, wide: bool) -> tuple[str, int]:
        """What a matrix stored so is quantised to, and its group; ("", 0): it is held as stored."""
        if self._weights == "stored" or format in READERS:
            return "", 0
        target = "int8" if wide else self._weights
        return target, self._group or _TARGETS[target]

    def prepare(self, weight: Weight) -> Prepared:
        """Pack a matrix or a stack of them for the kernels, on all threads; a vector becomes float32, and so does a
        router, whose rounding would send tokens elsewhere.

        Raises:
            ModelFileError: the weight's data do not fit its shape, or hold an infinity or NaN.
        """
        if len(weight.shape) == 1:
            vector = np.ascontiguousarray(weight.dequantise())
            if not np.isfinite(vector).all():
                raise ModelFileError(f"tensor {weight.name}: {NOT_FINITE}")
            self._bytes["fp32"] += vector.nbytes
            return self._module.Vector(vector)
        if weight.part == "router":
            weight = Weight(weight.name, weight.shape, "f32", weight.dequantise().view(np.uint8), weight.origin)
            target, group = "", 0
        else:
            target, group = self._target(weight.format, weight.part in _WIDE)
        cache = self._cache if target and weight.origins else None
        matrix = cache.find(weight, target, group) if cache is not None else None
        if matrix is None:
            matrix = self._pack(weight, target, group)
            if cache is not None:
                cache.keep(weight, target, group, matrix)
        self._bytes["int8" if target else FORMATS[weight.format].multiplied_on_cpu] += matrix.nbytes
        return matrix

    def _pack(self, weight: Weight, target: str, group: int) -> Any:
        for origin in weight.origins:
            origin.fetch()
        try:
            matrix = self._engine.pack(list(weight.each()), weight.format, *weight.shape[-2:], target, group)
        except ValueError as error:
            raise ModelFileError(f"tensor {weight.name}: {error}") from None
        if not matrix.finite:
            raise ModelFileError(f"tensor {weight.name}: {NOT_FINITE}")
        return matrix

    def adapter_slots(self, shape: tuple[int, int], count: int, most_rank: int) -> AdapterSlots:
        return self._module.AdapterSlots(*shape, count, most_rank)

    def prepare_low_rank(self, weight: Weight) -> Prepared:
        if weight.format not in ("f32", "f16"):  # what meets activations as they are, not rounded
            data = np.ascontiguousarray(weight.dequantise()).view(np.uint8).reshape(-1)
            weight = replace(weight, format="f32", data=data, origin=None)
        return self._pack(weight, "", 0)

    def low_rank_bytes(self, shape: tuple[int, int], rank: int) -> int:
        out, inputs = shape
        return FLOAT * (_padded(rank, TILE) * _padded(inputs, 2) + _padded(out, TILE) * _padded(rank, 2))

    def block_bytes(self, group: KVGroup, block_size: int) -> int:
        return self._engine.block_bytes(self._layout_of(group, 1), block_size)

    def allocate(self, layout: CacheLayout) -> None:
        groups = [self._layout_of(group, blocks) for group, blocks in zip(layout.groups, layout.blocks, strict=True)]
        self._engine.allocate(groups, layout.block_size)
        self._groups = len(groups)

    def _layout_of(self, group: KVGroup, blocks: int) -> Any:
        if group.kind not in ("full", "window", "latent"):
            raise NotImplementedError(f"the native backend has no cache of kind {group.kind!r}")
        return self._module.GroupLayout(
            list(group.layers),
            group.heads,
            group.key_width,
            group.value_width,
            group.window or 0,
            blocks,
            group.kind == "latent",
        )

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        self._engine.copy_blocks(group, list(pairs))

    def read_block(self, group: int, block: int, to: np.ndarray) -> None:
        self._engine.read_block(group, block, to)

    def write_block(self, group: int, block: int, data: np.ndarray) -> None:
        self._engine.write_block(group, block, data)

    def mask(self, logits: Logits, numbers: Sequence[int], masks: np.ndarray, undoable: bool) -> Masking | None:
        """In place; what is not to be undone is not kept."""
        before = Masking.of(logits, numbers) if undoable else None
        self._engine.mask(logits.rows, logits.peaks, np.array(numbers, np.int32), masks)
        return before

    def draw(self, logits: Logits, draws: Draws) -> np.ndarray:
        """A token per draw, on all threads, looking only at the tiles of the vocabulary that can matter."""
        table = draws.table
        tokens = np.empty(len(draws), np.int32)
        self._engine.draw(
            logits.rows,
            logits.peaks,
            logits.logsumexp,
            draws.slots,
            draws.rows,
            draws.positions,
            table.temperature,
            table.top_k,
            table.top_p,
            table.min_p,
            table.seed,
            table.choice,
            tokens,
        )
        return tokens

    def compile(self, forward: Forward) -> Program:
        """Record `forward`. A cache of its groups must be allocated before, of any size."""
        if not self._groups:
            raise ValueError("allocate the cache before compiling")
        program = self._module.Program(self._engine)
        program.finish(forward(NativeOps(self._module, program)).number)
        return NativeProgram(program)

    def close(self) -> None:
        """The cache goes at once; threads when the last program of this backend is forgotten."""
        if self._engine is not None:
            self._engine.allocate([], 1)
        self._engine = self._cache = None

    def probe_bandwidth(self, bytes: int = 768 << 20, rounds: int = 5) -> float:
        """Bytes per second that all threads together read from memory: the roof of decoding."""
        return self._engine.probe_bandwidth(bytes, rounds)

    def probe_compute(self, kind: str, seconds: float = 0.2) -> float:
        """Operations per second of all threads (a multiply-add is two). kind: "fp32", "bf16" or "int8"."""
        return self._engine.probe_compute(kind, seconds)


def _padded(numbers: int, to: int) -> int:
    return -(-numbers // to) * to


def _holding(format: str) -> tuple[BackendSetup, str]:
    """A setup that holds matrices in `format`, as `held_as` names it, and what it is given."""
    target, _, group = format.partition("/")
    if target in ("int8", "int4") and group in map(str, GROUPS):
        return BackendSetup(weights=target, group=int(group)), "bf16"
    if format not in READABLE:
        accepted = ", ".join([*READABLE, f"int8/G and int4/G with G one of {GROUPS}"])
        raise BadInput("--formats", f"{format!r} is not a weight format; accepted: {accepted}")
    return BackendSetup(), format


register(
    BackendKind(
        "native",
        make=lambda setup: NativeBackend(
            setup.threads, setup.weights, setup.group, setup.kv or CACHED[0], pack_cache=setup.pack_cache
        ),
        why_not=native.why_not,
        holding=_holding,
        rank=0,
        caches=CACHED,
        quantises=True,
        probe=NativeBackend,
        probed=("fp32", "bf16", "int8"),
    )
)
