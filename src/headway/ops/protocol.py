"""Seam two: the operations a model family is written over, and what a backend must provide to run them.

A family is one plain function `forward(ops) -> logits`. It sees handles (`Tensor`), never sizes or values:

* every handle has a static feature width and one symbolic leading axis: the step's new tokens, its logit rows, or the
  rows whose hidden states are wanted;
* the family may not branch on a size or on a value, so the same calls are right for every step;
* everything that changes from step to step is in one `StepBatch`, which the family never touches.

So a backend may run the calls as they come (`reference`), record them once and replay a whole step in one native
call (`native`), or capture them in a CUDA graph. Data-dependent work stays inside one op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from headway.ops.routing import ClampedSwiGLU, Routing
from headway.ops.weight import Weight
from headway.sampling.operations import AnyLogits, LogitOps
from headway.shape.model import KVGroup

Tensor = Any  # a handle: numpy array, recorded value number, device tensor
Prepared = Any  # a weight in the form the backend computes with

NO_ROWS = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of a layer.

    Attributes:
        inv_freq: [rotary_dim / 2], angle per position of each pair, rounded to float32, scaling already applied.
        interleaved: pairs are (0,1),(2,3)... (GGUF's llama order) instead of (0, half),(1, half+1)... (HF's order).
        magnitude: factor on cos and sin (YaRN's attention factor); 1 = none.
        longer: inv_freq of rows that knew more than `original` tokens when they were begun; () = the same.
    """

    inv_freq: tuple[float, ...]
    interleaved: bool = False
    magnitude: float = 1.0
    longer: tuple[float, ...] = ()
    original: int = 0


@dataclass(frozen=True)
class CacheLayout:
    """The paged cache: per group `blocks` blocks of `block_size` tokens.

    Keys and values of a layer lie as [block][head][slot][width], each in its own array (of latent attention the vector
    and the rotary key behind it in one); how numbers lie within a head of a block is the backend's own (the native one
    interleaves pairs of slots).
    """

    groups: tuple[KVGroup, ...]
    blocks: tuple[int, ...]  # per group
    block_size: int

    def of_layer(self, layer: int) -> tuple[int, int]:
        """(group, index of the layer within the group)."""
        for number, group in enumerate(self.groups):
            if layer in group.layers:
                return number, group.layers.index(layer)
        raise KeyError(f"layer {layer} caches nothing")


@dataclass(frozen=True)
class GroupBatch:
    """A step's view of one KV group.

    Attributes:
        block_table: int32 [rows, max_blocks]; entry j holds positions [j*block_size, (j+1)*block_size); -1 = none.
        slots: int64 [tokens], where each new token's key and value go: block * block_size + offset.
    """

    block_table: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True)
class StepBatch:
    """All that changes from step to step. Rows are concatenated along the token axis, without padding.

    Attributes:
        ids: int32 [tokens], token ids.
        positions: int32 [tokens], position of each within its sequence.
        query_start: int32 [rows + 1]; row r owns tokens [query_start[r], query_start[r+1]).
        kv_len: int32 [rows], cached tokens of the row once this step's are written.
        groups: one view per KV group.
        logit_index: int32 [logit_rows], which tokens' logits are wanted.
        adapter: int32 [rows], adapter number, 0 = none.
        known: int32 [rows], tokens of a row when it was begun, computed or not; None = kv_len.
        pool_index: int32 [pooled rows], which tokens' hidden states are wanted.
    """

    ids: np.ndarray
    positions: np.ndarray
    query_start: np.ndarray
    kv_len: np.ndarray
    groups: tuple[GroupBatch, ...]
    logit_index: np.ndarray
    adapter: np.ndarray
    known: np.ndarray | None = None
    pool_index: np.ndarray = field(default_factory=lambda: NO_ROWS)

    @classmethod
    def alone(cls, ids: Sequence[int], first: int, blocks: int, groups: int) -> StepBatch:
        """One sequence's tokens at positions from `first` on, all their logits wanted; the cache of each KV group holds
        it in blocks 0 to `blocks`, in order."""
        positions = np.arange(first, first + len(ids), dtype=np.int32)
        view = GroupBatch(np.arange(blocks, dtype=np.int32)[None], positions.astype(np.int64))
        return cls(
            ids=np.array(ids, np.int32),
            positions=positions,
            query_start=np.array([0, len(ids)], np.int32),
            kv_len=np.array([first + len(ids)], np.int32),
            groups=(view,) * groups,
            logit_index=np.arange(len(ids), dtype=np.int32),
            adapter=np.zeros(1, np.int32),
        )


class AdapterSlots(Protocol):
    """Low-rank matrices of one linear layer, by the number of their adapter (`StepBatch.adapter`). Changed between
    steps."""

    def put(self, number: int, down: Prepared, up: Prepared, scale: float) -> None:
        """down [rank, in] and up [out, rank], from `Backend.prepare_low_rank`."""
        ...

    def clear(self, number: int) -> None:
        """The adapter leaves the layer alone."""
        ...


class Ops(Protocol):
    """What a family may call. Leading axis T = new tokens of the step, R = logit rows, P = pooled rows; widths are
    static."""

    def embed(self, table: Prepared, scale: float = 1.0, positions: Prepared | None = None) -> Tensor:
        """scale * rows of `table` [vocab, d] for the batch's ids (+ rows of `positions` [context, d]) -> [T, d]."""
        ...

    def rms_norm(self, x: Tensor, weight: Prepared, eps: float, residual: Tensor | None = None) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight (+ residual), over every len(weight) numbers of x [*, n * len(weight)]:
        the whole of a row, or each of its heads -> same shape."""
        ...

    def layer_norm(self, x: Tensor, weight: Prepared, bias: Prepared | None, eps: float, parts: int = 1) -> Tensor:
        """(x - mean(x)) / sqrt(variance(x) + eps) * weight (+ bias), over each of so many equal parts of a row of x
        -> same shape. weight and bias: as long as a part, or as a row."""
        ...

    def linear(
        self, x: Tensor, weight: Prepared, bias: Prepared | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """x [*, in] @ weight[out, in].T (+ bias) (+ residual) -> [*, out]."""
        ...

    def rope_and_cache(self, q: Tensor, k: Tensor, v: Tensor, layer: int, rope: Rope) -> Tensor:
        """Rotate q [T, heads*w] and k [T, kv_heads*w] by position, write k and v [T, kv_heads*w] to the layer's
        cache at the batch's slots -> rotated q."""
        ...

    def attention(
        self, q: Tensor, layer: int, scale: float, softcap: float = 0.0, sinks: Prepared | None = None
    ) -> Tensor:
        """Causal attention of q [T, heads*w] over the layer's cache (keys and values read as stored, the chunk's own
        included), within the group's window if it has one -> [T, heads*value_width]. Query head h reads key/value head
        h // (heads / kv_heads). softcap c > 0: scores become c * tanh(scores / c). sinks [heads]: a score per head of
        a token without value, which takes its share of the attention."""
        ...

    def gated_mlp(
        self,
        x: Tensor,
        gate: Prepared,
        up: Prepared,
        down: Prepared,
        activation: str,
        residual: Tensor | None = None,
        gate_bias: Prepared | None = None,
        up_bias: Prepared | None = None,
        down_bias: Prepared | None = None,
    ) -> Tensor:
        """down @ (activation(gate @ x) * (up @ x)) (+ residual) -> same shape as x. activation: "silu", "gelu",
        "gelu_tanh" (its approximation), "relu", "relu2" (its square).
        Each of the three products has its bias added, if there is one."""
        ...

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """activation(x), of the same shape."""
        ...

    def gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up, of one shape: what `gated_mlp` does between its matrices."""
        ...

    def add_low_rank(self, y: Tensor, x: Tensor, slots: AdapterSlots) -> Tensor:
        """y [T, out] + scale * up @ down @ x [T, in], with the matrices that `slots` holds for the adapter of a token's
        row; tokens without adapter, or of one without matrices here, keep their y. y is the output of `linear` of x,
        and is not used otherwise."""

    def experts(
        self,
        x: Tensor,
        router: Prepared,
        gate: Prepared,
        up: Prepared,
        down: Prepared,
        routing: Routing,
        activation: str | ClampedSwiGLU,
        router_bias: Prepared | None = None,
        correction: Prepared | None = None,
        gate_bias: Prepared | None = None,
        up_bias: Prepared | None = None,
        down_bias: Prepared | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """The weighted sum of a few gated MLPs, chosen for every row of x [*, d] by its router (+ residual) -> same
        shape as x.

        router [experts, d] (+ router_bias) makes a number per expert, which `routing` turns into choice and weights;
        correction [experts] takes part in the choice alone. gate and up are stacks [experts, f, d], down is one of
        [experts, d, f]; their biases are vectors, expert by expert."""
        ...

    def sigmoid_gate(self, x: Tensor, gate: Tensor, residual: Tensor | None = None) -> Tensor:
        """sigmoid(gate [*, 1]) * x (+ residual) -> same shape as x: a number per row says how much of it counts."""
        ...

    def latent_attention(
        self,
        q: Tensor,
        latent: Tensor,
        norm: Prepared,
        key_up: Prepared,
        value_up: Prepared,
        layer: int,
        scale: float,
        rope: Rope,
        eps: float,
    ) -> Tensor:
        """Multi-head latent attention (DeepSeek V2), its cache written first -> [T, heads * v].

        Of latent [T, c + r], the first c numbers, rms-normed, and the last r, rotated, are all that is cached of a
        token. Of q [T, heads * (n + r)], every head's last r numbers are rotated. A head's key is key_up[head] [c, n]
        transposed times the cached c, then the cached r; its value is value_up[head] [v, c] times the cached c. Both
        projections are absorbed into query and result, whatever the number of new tokens: heads attend over the
        cached numbers themselves."""
        ...

    def logit_rows(self, x: Tensor) -> Tensor:
        """Keep the tokens whose logits are wanted: [T, d] -> [R, d]."""
        ...

    def logits(
        self, x: Tensor, head: Prepared, scale: float = 1.0, softcap: float = 0.0, bias: Prepared | None = None
    ) -> Tensor:
        """(x [R, d] @ head[vocab, d].T (+ bias)) * scale, softcapped if c > 0 -> float32 [R, vocab]."""
        ...

    def pool_rows(self, x: Tensor) -> Tensor:
        """Keep the tokens whose hidden states are wanted: [T, d] -> [P, d]."""
        ...

    def pooled(self, x: Tensor) -> None:
        """Hand x [P, d] out: it is `Program.pooled` after the step. Called once, if at all."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the tensor-parallel ranks; identity on one rank."""
        ...


Forward = Callable[[Ops], Tensor]


class Program(Protocol):
    """A family's forward pass, ready to be run step after step."""

    def step_bytes(self, tokens: int, rows: int, logit_rows: int, cached: int, longest: int) -> int:
        """Bytes that a step of such a size takes at most, besides weights and cache: values, scratch of the threads,
        logits. cached: tokens that its rows see, all together; longest: that one sees."""
        ...

    @property
    def experts(self) -> tuple[int, ...]:
        """How many experts the last step's rows were routed to, per `experts` operation; () without any."""
        ...

    @property
    def pooled(self) -> np.ndarray:
        """Hidden states of the last step's rows that are pooled, after the last norm -> float32 [pooled rows, d], valid
        until the next step."""
        ...

    def run(self, batch: StepBatch) -> AnyLogits:
        """Compute a step, writing the cache -> logits [logit_rows, vocab] for the backend's own operations on them,
        valid until the next step."""
        ...


class Backend(LogitOps, Protocol):
    """A device with its weights and cache, and the operations on the logits it makes. One per executor; not
    thread-safe."""

    name: str
    deterministic: bool  # a row's result never depends on its neighbours or on how its prompt was cut
    kv_format: str  # what keys and values are cached in
    kv_dtype_bytes: float  # bytes per cached number

    @property
    def math(self) -> str:
        """Number format it multiplies most weights in, as hardware profiles name them: "fp32", "bf16", "int8"."""
        ...

    @property
    def build(self) -> str:
        """Changes with whatever decides the bits of its results besides weights and inputs: kernels, their version."""
        ...

    def held_as(self, format: str, head: bool = False) -> str:
        """The format in which it computes with a matrix stored in `format`, as step-time profiles name it. head: it is
        the output matrix."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes held by the weights prepared so far."""
        ...

    def prepare(self, weight: Weight) -> Prepared:
        """Bring a weight into the form this backend computes with. Called once per weight, at load; a tied weight is
        prepared once and used twice."""
        ...

    def adapter_slots(self, shape: tuple[int, int], count: int, most_rank: int) -> AdapterSlots:
        """Empty slots of a linear layer [out, in] for adapters numbered from 1 to `count`."""
        ...

    def prepare_low_rank(self, weight: Weight) -> Prepared:
        """A matrix of an adapter, in float32 or float16; not part of `weight_bytes`."""
        ...

    def low_rank_bytes(self, shape: tuple[int, int], rank: int) -> int:
        """The most that an adapter's two matrices for a linear layer [out, in] take."""
        ...

    def block_bytes(self, group: KVGroup, block_size: int) -> int:
        """What `allocate` takes for one block of a group, padding included."""
        ...

    def allocate(self, layout: CacheLayout) -> None:
        """Create the empty cache; the one before it is given back."""
        ...

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy cache blocks (src, dst) in every layer of a group."""
        ...

    def read_block(self, group: int, block: int, to: np.ndarray) -> None:
        """Copy a block of every layer of a group into `to`, uint8 [`block_bytes`], in this backend's own order."""
        ...

    def write_block(self, group: int, block: int, data: np.ndarray) -> None:
        """Put what `read_block` gave into a block."""
        ...

    def compile(self, forward: Forward) -> Program:
        """Make `forward` runnable. It is called with an `Ops` of this backend."""
        ...

    def close(self) -> None:
        """Give back cache and threads; idempotent. Nothing else may be called afterwards."""
        ...


class Probed(Protocol):
    """A backend that can measure the machine it runs on, with its own kernels."""

    def probe_bandwidth(self, bytes: int = ..., rounds: int = ...) -> float:
        """Bytes per second that its threads read from memory."""
        ...

    def probe_compute(self, kind: str, seconds: float = ...) -> float:
        """Operations per second in a number format (a multiply-add is two)."""
        ...
