"""The specification you can read: every operation in numpy float32. The oracle of every kernel test.

Values are plain arrays, linear algebra is BLAS, and the only Python loops are over rows of a step and over tiles of
a long chunk, never over tokens. Numbers may differ in the last bits with the shape of a step, because BLAS sums in
an order that depends on it; `deterministic` says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from headway.core.errors import ModelFileError
from headway.ops.activations import ACTIVATIONS, gated
from headway.ops.paged import LayerCache, attend, cap, rotate
from headway.ops.protocol import AdapterSlots, CacheLayout, Forward, Program, Rope, StepBatch
from headway.ops.recording import RecordingOps
from headway.ops.registry import BackendKind, BackendSetup, register
from headway.ops.routing import ClampedSwiGLU, Routing, choose
from headway.ops.weight import NOT_FINITE, Weight
from headway.sampling.logits import Logits, summarise
from headway.sampling.operations import NumpyLogits
from headway.shape.model import KVGroup, block_bytes

_TILE = 128  # queries of one row attended to at once: bounds the score matrix
ALIVE = 4  # arrays of an operation at once
_BATCHED = 8  # rows with the same number of queries, up to this, are attended to together


class LowRank:
    """`AdapterSlots`.

    Attributes:
        pairs: number of an adapter -> its matrices down [rank, in] and up [out, rank], and the factor.
    """

    def __init__(self) -> None:
        self.pairs: dict[int, tuple[np.ndarray, np.ndarray, np.float32]] = {}

    def put(self, number: int, down: np.ndarray, up: np.ndarray, scale: float) -> None:
        self.pairs[number] = down, up, np.float32(scale)

    def clear(self, number: int) -> None:
        self.pairs.pop(number, None)


class ReferenceBackend(NumpyLogits):
    """numpy on the CPU.

    Args:
        poison: fill a fresh cache with NaN instead of zeros, so that a slot read before it was written shows.
    """

    name = "reference"
    deterministic = False
    kv_format = "f32"
    kv_dtype_bytes = 4.0
    build = f"numpy {np.__version__}"
    math = "fp32"

    def __init__(self, poison: bool = False) -> None:
        self._fill = np.nan if poison else 0.0
        self.caches: dict[int, LayerCache] = {}
        self.weight_bytes = 0
        self._layout: CacheLayout | None = None

    def held_as(self, format: str, head: bool = False) -> str:
        """Everything is float32."""
        return "f32"

    def prepare(self, weight: Weight) -> np.ndarray:
        """Dequantise to float32 of the same shape. BLAS would copy a misaligned view at every use: copy it once."""
        prepared = np.require(weight.dequantise(), np.float32, ["C", "A"])
        if not np.isfinite(prepared).all():
            raise ModelFileError(f"tensor {weight.name}: {NOT_FINITE}")
        self.weight_bytes += prepared.nbytes
        return prepared

    def allocate(self, layout: CacheLayout) -> None:
        self.caches, self._layout = {}, layout
        for number, (group, blocks) in enumerate(zip(layout.groups, layout.blocks, strict=True)):
            if group.kind not in ("full", "window", "latent"):
                raise NotImplementedError(f"the reference backend has no cache of kind {group.kind!r}")
            window = group.window if group.kind == "window" else None
            for layer in group.layers:
                if group.kind == "latent":
                    keys = self._pages(group, blocks, layout, group.value_width + group.key_width)
                    values = keys[..., : group.value_width]
                else:
                    keys, values = (
                        self._pages(group, blocks, layout, width) for width in (group.key_width, group.value_width)
                    )
                self.caches[layer] = LayerCache(number, window, keys, values)

    def adapter_slots(self, shape: tuple[int, int], count: int, most_rank: int) -> LowRank:
        return LowRank()

    def prepare_low_rank(self, weight: Weight) -> np.ndarray:
        before = self.weight_bytes
        prepared = self.prepare(weight)
        self.weight_bytes = before
        return prepared

    def low_rank_bytes(self, shape: tuple[int, int], rank: int) -> int:
        return 4 * rank * sum(shape)

    def _pages(self, group: KVGroup, blocks: int, layout: CacheLayout, width: int) -> np.ndarray:
        shape = (blocks, group.heads, layout.block_size, width)
        return np.full(shape, self._fill, np.float32) if self._fill else np.zeros(shape, np.float32)

    def block_bytes(self, group: KVGroup, block_size: int) -> int:
        return int(block_bytes(group, block_size))

    def close(self) -> None:
        self.caches, self._layout = {}, None

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        for cache in self.caches.values():
            if cache.group == group:
                for source, target in pairs:
                    cache.keys[target] = cache.keys[source]
                    cache.values[target] = cache.values[source]

    def read_block(self, group: int, block: int, to: np.ndarray) -> None:
        for part, piece in self._parts(group, block, to):
            piece[:] = part

    def write_block(self, group: int, block: int, data: np.ndarray) -> None:
        for part, piece in self._parts(group, block, data):
            part[:] = piece

    def _parts(self, group: int, block: int, whole: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The keys and values of a block in each layer, and their places in the block as a whole."""
        numbers, at = whole.view(np.float32), 0
        for cache in self.caches.values():
            if cache.group != group:
                continue
            latent = np.may_share_memory(cache.keys, cache.values)
            for part in (cache.keys[block],) if latent else (cache.keys[block], cache.values[block]):
                yield part, numbers[at : at + part.size].reshape(part.shape)
                at += part.size
        if at != numbers.size:
            raise ValueError(f"a block of group {group} is not of this size")

    def compile(self, forward: Forward) -> Program:
        if self._layout is None:
            raise ValueError("allocate the cache before compiling")
        return ReferenceProgram(self, forward, self._layout)


class ReferenceProgram:
    """Runs the family's function anew for every step."""

    def __init__(self, backend: ReferenceBackend, forward: Forward, layout: CacheLayout) -> None:
        self._backend = backend
        self._forward = forward
        self._layout = layout
        self.experts: tuple[int, ...] = ()
        self.pooled = np.zeros((0, 0), np.float32)

    def step_bytes(self, tokens: int, rows: int, logit_rows: int, cached: int, longest: int) -> int:
        """An operation's inputs, output and temporaries, all as wide as the widest. Attention copies the keys and
        values that rows see together, and scores them for a tile of queries."""
        ops = RecordingOps(self._layout)
        self._forward(ops)
        group = max(self._layout.groups, key=lambda group: group.heads)
        values = ALIVE * (tokens * ops.widths["tokens"] + logit_rows * ops.widths["rows"])
        latent = group.value_width if group.kind == "latent" else 0
        heads = ops.widths["tokens"] // (group.key_width + latent)
        scores = ALIVE * heads * max(min(tokens, _TILE) * longest, cached)
        return 4 * (values + scores) + 2 * int(block_bytes(group, cached)) // len(group.layers)

    def run(self, batch: StepBatch) -> Logits:
        ops = ReferenceOps(self._backend.caches, batch)
        logits = self._forward(ops)
        if batch.adapter.any() and not ops.adapts:
            raise ValueError("a row's adapter is none of the program's")
        self.experts, self.pooled = tuple(ops.touched), ops.hidden
        return summarise(logits)


class ReferenceOps:
    """The operations, for one step. T = new tokens, R = logit rows, P = pooled rows; see `Ops` for each contract."""

    def __init__(self, caches: dict[int, LayerCache], batch: StepBatch) -> None:
        self._caches = caches
        self._batch = batch
        self._angles: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by id of a Rope, which outlives the step
        self.adapts = False  # rows may have adapters
        self.touched: list[int] = []  # experts with rows, per `experts` so far
        self.hidden = np.zeros((0, 0), np.float32)  # what is handed out beside logits

    def embed(self, table: np.ndarray, scale: float = 1.0, positions: np.ndarray | None = None) -> np.ndarray:
        x = table[self._batch.ids] * np.float32(scale)
        return x if positions is None else x + positions[self._batch.positions]

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float, residual: np.ndarray | None = None) -> np.ndarray:
        parts = x.reshape(len(x), x.shape[1] // len(weight), len(weight))
        mean_square = np.square(parts).mean(axis=-1, keepdims=True)
        out = (parts / np.sqrt(mean_square + np.float32(eps)) * weight).reshape(x.shape)
        return out if residual is None else out + residual

    def layer_norm(
        self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, eps: float, parts: int = 1
    ) -> np.ndarray:
        cut = x.reshape(len(x), parts, x.shape[1] // parts)
        cut = cut - cut.mean(axis=-1, keepdims=True)
        normed = cut / np.sqrt(np.square(cut).mean(axis=-1, keepdims=True) + np.float32(eps))
        out = normed * weight.reshape(-1, cut.shape[-1])
        return (out if bias is None else out + bias.reshape(-1, cut.shape[-1])).reshape(x.shape)

    def linear(
        self,
        x: np.ndarray,
        weight: np.ndarray,
        bias: np.ndarray | None = None,
        residual: np.ndarray | None = None,
    ) -> np.ndarray:
        out = x @ weight.T
        if bias is not None:
            out += bias
        if residual is not None:
            out += residual
        return out

    def rope_and_cache(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, layer: int, rope: Rope) -> np.ndarray:
        cache = self._caches[layer]
        _, heads, block_size, width = cache.keys.shape
        block, slot = np.divmod(self._batch.groups[cache.group].slots, block_size)
        cos, sin = self._cos_sin(rope)
        cache.keys[block, :, slot] = rotate(k.reshape(len(k), heads, width), cos, sin, rope.interleaved)
        cache.values[block, :, slot] = v.reshape(len(v), heads, -1)
        return rotate(q.reshape(len(q), -1, width), cos, sin, rope.interleaved).reshape(q.shape)

    def _cos_sin(self, rope: Rope) -> tuple[np.ndarray, np.ndarray]:
        """Each float32 [T, 1, rotary_dim / 2]."""
        if id(rope) not in self._angles:
            inv_freq = np.array(rope.inv_freq, np.float32)
            if rope.longer:
                batch = self._batch
                long = (batch.kv_len if batch.known is None else batch.known) > rope.original
                of_rows = np.where(long[:, None], np.array(rope.longer, np.float32), inv_freq)
                inv_freq = np.repeat(of_rows, np.diff(batch.query_start), axis=0)[:, None]
            angle = self._batch.positions.astype(np.float32)[:, None, None] * inv_freq
            magnitude = np.float32(rope.magnitude)
            self._angles[id(rope)] = (np.cos(angle) * magnitude, np.sin(angle) * magnitude)
        return self._angles[id(rope)]

    def attention(
        self, q: np.ndarray, layer: int, scale: float, softcap: float = 0.0, sinks: np.ndarray | None = None
    ) -> np.ndarray:
        cache = self._caches[layer]
        group = self._batch.groups[cache.group]
        width = cache.keys.shape[3]
        heads = q.shape[1] // width
        out = np.empty((len(q), heads, cache.values.shape[3]), np.float32)
        queries = (q * np.float32(scale)).reshape(len(q), heads, width)
        for rows, tokens in self._tiles:
            out[tokens] = attend(queries[tokens], self._batch.positions[tokens], cache, group, rows, softcap, sinks)
        return out.reshape(len(q), -1)

    @cached_property
    def _tiles(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Rectangles of work: rows [n] and their tokens [n, c]. Short rows of equal length go together if their
        contexts are within a factor of two (the shorter are padded); a long row goes alone, in tiles."""
        start = self._batch.query_start
        alike: dict[tuple[int, int], list[int]] = {}
        tiles = []
        for row, (first, end, context) in enumerate(zip(start[:-1], start[1:], self._batch.kv_len, strict=True)):
            if 0 < end - first <= _BATCHED:
                alike.setdefault((end - first, int(context).bit_length()), []).append(row)
            else:
                spans = range(first, end, _TILE)
                tiles += [(np.array([row]), np.arange(at, min(at + _TILE, end))[None]) for at in spans]
        for (count, _), rows in alike.items():
            tiles.append((np.array(rows), start[rows][:, None] + np.arange(count)))
        return tiles

    def gated_mlp(
        self,
        x: np.ndarray,
        gate: np.ndarray,
        up: np.ndarray,
        down: np.ndarray,
        activation: str,
        residual: np.ndarray | None = None,
        gate_bias: np.ndarray | None = None,
        up_bias: np.ndarray | None = None,
        down_bias: np.ndarray | None = None,
    ) -> np.ndarray:
        gated = self.gated(self.linear(x, gate, gate_bias), self.linear(x, up, up_bias), activation)
        return self.linear(gated, down, down_bias, residual)

    def activate(self, x: np.ndarray, activation: str) -> np.ndarray:
        return ACTIVATIONS[activation](x)

    def gated(self, gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
        return gated(gate, up, activation)

    def add_low_rank(self, y: np.ndarray, x: np.ndarray, slots: AdapterSlots) -> np.ndarray:
        assert isinstance(slots, LowRank)
        self.adapts = True
        batch = self._batch
        for number in np.unique(batch.adapter).tolist():
            if number in slots.pairs:
                down, up, scale = slots.pairs[number]
                tokens = np.repeat(batch.adapter == number, np.diff(batch.query_start))
                y[tokens] += scale * (x[tokens] @ down.T @ up.T)
        return y

    def experts(
        self,
        x: np.ndarray,
        router: np.ndarray,
        gate: np.ndarray,
        up: np.ndarray,
        down: np.ndarray,
        routing: Routing,
        activation: str | ClampedSwiGLU,
        router_bias: np.ndarray | None = None,
        correction: np.ndarray | None = None,
        gate_bias: np.ndarray | None = None,
        up_bias: np.ndarray | None = None,
        down_bias: np.ndarray | None = None,
        residual: np.ndarray | None = None,
    ) -> np.ndarray:
        chosen, weights = choose(self.linear(x, router, router_bias), routing, correction)
        out = np.zeros_like(x) if residual is None else residual.copy()
        touched = np.unique(chosen)
        self.touched.append(len(touched))
        of_expert = [None if bias is None else bias.reshape(len(gate), -1) for bias in (gate_bias, up_bias, down_bias)]
        for expert in touched:
            rows, ranks = np.nonzero(chosen == expert)
            biases = [None if bias is None else bias[expert] for bias in of_expert]
            gates, ups = self.linear(x[rows], gate[expert], biases[0]), self.linear(x[rows], up[expert], biases[1])
            hidden = gated(gates, ups, activation)
            out[rows] += self.linear(hidden, down[expert], biases[2]) * weights[rows, ranks, None]
        return out

    def sigmoid_gate(self, x: np.ndarray, gate: np.ndarray, residual: np.ndarray | None = None) -> np.ndarray:
        with np.errstate(over="ignore"):
            out = x / (1 + np.exp(-gate))
        return out if residual is None else out + residual

    def latent_attention(
        self,
        q: np.ndarray,
        latent: np.ndarray,
        norm: np.ndarray,
        key_up: np.ndarray,
        value_up: np.ndarray,
        layer: int,
        scale: float,
        rope: Rope,
        eps: float,
    ) -> np.ndarray:
        heads, rank, plain = key_up.shape
        cos, sin = self._cos_sin(rope)
        vector, turned = self.rms_norm(latent[:, :rank], norm, eps), latent[:, None, rank:]
        cache = self._caches[layer]
        block, slot = np.divmod(self._batch.groups[cache.group].slots, cache.keys.shape[2])
        cache.keys[block, 0, slot, :rank] = vector
        cache.keys[block, 0, slot, rank:] = rotate(turned, cos, sin, rope.interleaved)[:, 0]
        q = q.reshape(len(q), heads, -1)
        absorbed = (q[:, :, None, :plain] @ key_up.swapaxes(1, 2))[:, :, 0]
        queries = np.concatenate([absorbed, rotate(q[..., plain:], cos, sin, rope.interleaved)], axis=2)
        attended = self.attention(queries.reshape(len(q), -1), layer, scale)
        return (attended.reshape(len(q), heads, 1, rank) @ value_up.swapaxes(1, 2)).reshape(len(q), -1)

    def logit_rows(self, x: np.ndarray) -> np.ndarray:
        return x[self._batch.logit_index]

    def pool_rows(self, x: np.ndarray) -> np.ndarray:
        return x[self._batch.pool_index]

    def pooled(self, x: np.ndarray) -> None:
        self.hidden = x

    def logits(
        self,
        x: np.ndarray,
        head: np.ndarray,
        scale: float = 1.0,
        softcap: float = 0.0,
        bias: np.ndarray | None = None,
    ) -> np.ndarray:
        out = self.linear(x, head, bias)
        if scale != 1.0:
            out *= np.float32(scale)
        return cap(out, softcap)

    def all_reduce(self, x: np.ndarray) -> np.ndarray:
        return x


register(
    BackendKind(
        "reference",
        make=lambda setup: ReferenceBackend(),
        why_not=lambda: None,
        holding=lambda format: (BackendSetup(), "f32"),
        rank=1,
        caches=("f32",),
        blas=True,
    )
)
