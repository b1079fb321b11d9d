"""A backend that records a family's calls once and replays them on another: the test that a family looks at nothing.

    RecordingBackend(ReferenceBackend()).compile(family).run(batch)

While recording, the family is given handles that know only their number, static width and axis ("tokens" or "rows").
Looking at a size or a value of one raises `LookedAtHandle`; a width or axis that does not fit raises too, before any
number is computed. What was recorded is itself a forward pass, which the other backend compiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from headway.core.step import TokenLogprobs
from headway.ops.protocol import AdapterSlots, Backend, CacheLayout, Forward, Ops, Prepared, Program, Rope, Tensor
from headway.ops.routing import ClampedSwiGLU, Routing
from headway.ops.weight import Weight
from headway.sampling.operations import AnyLogits, Undo
from headway.sampling.rows import RowState
from headway.sampling.table import Draws
from headway.shape.model import KVGroup


class LookedAtHandle(TypeError):
    """A family looked at the size or the value of a handle."""


class Handle:
    """A value of the recorded program. A family can do nothing with it but hand it to an operation."""

    __slots__ = ("_axis", "_number", "_width")

    def __init__(self, number: int, axis: str, width: int) -> None:
        self._number = number
        self._axis = axis
        self._width = width

    def _refuse(self, *_: object) -> NoReturn:
        raise LookedAtHandle("a family may only hand a handle to an operation, not look at its size or value")

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __int__ = __float__ = __index__ = __array__ = _refuse
    __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __neg__ = __getattr__
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __getattr__


@dataclass(frozen=True)
class RecordedWeight:
    """A prepared weight and the shape it must fit."""

    shape: tuple[int, ...]
    prepared: Prepared


@dataclass(frozen=True)
class Call:
    """One operation. Handles and weights among the arguments are kept as they were given."""

    name: str
    arguments: tuple[Any, ...]


class RecordingBackend:
    """Weights, cache and arithmetic are the inner backend's.

    Attributes:
        recorded: how many forward passes were recorded.
    """

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.name = f"recording({inner.name})"
        self.deterministic = inner.deterministic
        self.kv_format = inner.kv_format
        self.kv_dtype_bytes = inner.kv_dtype_bytes
        self.build = inner.build
        self.recorded = 0
        self._layout: CacheLayout | None = None

    @property
    def math(self) -> str:
        return self._inner.math

    @property
    def weight_bytes(self) -> int:
        return self._inner.weight_bytes

    def held_as(self, format: str, head: bool = False) -> str:
        return self._inner.held_as(format, head)

    def prepare(self, weight: Weight) -> RecordedWeight:
        return RecordedWeight(weight.shape, self._inner.prepare(weight))

    def adapter_slots(self, shape: tuple[int, int], count: int, most_rank: int) -> AdapterSlots:
        return self._inner.adapter_slots(shape, count, most_rank)

    def prepare_low_rank(self, weight: Weight) -> Prepared:
        return self._inner.prepare_low_rank(weight)

    def low_rank_bytes(self, shape: tuple[int, int], rank: int) -> int:
        return self._inner.low_rank_bytes(shape, rank)

    def block_bytes(self, group: KVGroup, block_size: int) -> int:
        return self._inner.block_bytes(group, block_size)

    def close(self) -> None:
        self._inner.close()

    def allocate(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._inner.allocate(layout)

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        self._inner.copy_blocks(group, pairs)

    def read_block(self, group: int, block: int, to: np.ndarray) -> None:
        self._inner.read_block(group, block, to)

    def write_block(self, group: int, block: int, data: np.ndarray) -> None:
        self._inner.write_block(group, block, data)

    def adjust(
        self, logits: AnyLogits, numbers: Sequence[int], rows: Sequence[RowState], positions: Sequence[int]
    ) -> Undo:
        return self._inner.adjust(logits, numbers, rows, positions)

    def vocab(self, logits: AnyLogits) -> int:
        return self._inner.vocab(logits)

    def mask(self, logits: AnyLogits, numbers: Sequence[int], masks: np.ndarray, undoable: bool) -> Undo | None:
        return self._inner.mask(logits, numbers, masks, undoable)

    def draw(self, logits: AnyLogits, draws: Draws) -> np.ndarray:
        return self._inner.draw(logits, draws)

    def logprobs(self, logits: AnyLogits, first: int, tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
        return self._inner.logprobs(logits, first, tokens, top)

    def compile(self, forward: Forward) -> Program:
        """Record `forward`, then compile the recording. The cache must be allocated before."""
        if self._layout is None:
            raise ValueError("allocate the cache before compiling")
        ops = RecordingOps(self._layout)
        result = forward(ops)
        self.recorded += 1
        return self._inner.compile(lambda inner: replay(ops.calls, result, inner))


def replay(calls: Sequence[Call], result: Handle, ops: Ops) -> Tensor:
    """Make the recorded calls on `ops`; call n made value n."""
    values: list[Tensor] = []

    def actual(argument: Any) -> Any:
        if isinstance(argument, Handle):
            return values[argument._number]
        return argument.prepared if isinstance(argument, RecordedWeight) else argument

    for call in calls:
        values.append(getattr(ops, call.name)(*map(actual, call.arguments)))
    return values[result._number]


class RecordingOps:
    """`Ops` that computes nothing: appends to `calls` and checks widths and axes."""

    def __init__(self, layout: CacheLayout) -> None:
        self.calls: list[Call] = []
        self.widths = {"tokens": 0, "rows": 0, "pooled": 0}  # the widest value on each axis
        self._layout = layout

    def embed(self, table: RecordedWeight, scale: float = 1.0, positions: RecordedWeight | None = None) -> Handle:
        if positions is not None and positions.shape[1] != table.shape[1]:
            raise ValueError(f"embed: positions of {positions.shape[1]} numbers for a table of {table.shape[1]}")
        return self._record("tokens", table.shape[1], "embed", table, scale, positions)

    def rms_norm(self, x: Handle, weight: RecordedWeight, eps: float, residual: Handle | None = None) -> Handle:
        if x._width % weight.shape[0]:
            raise ValueError(f"rms_norm: a weight of {weight.shape[0]} numbers for rows of {x._width}")
        if residual is not None:
            _fit("rms_norm's residual", residual, x._axis, x._width)
        return self._record(x._axis, x._width, "rms_norm", x, weight, eps, residual)

    def layer_norm(
        self, x: Handle, weight: RecordedWeight, bias: RecordedWeight | None, eps: float, parts: int = 1
    ) -> Handle:
        part, rest = divmod(x._width, parts)
        for vector in (weight, bias):
            if rest or (vector is not None and vector.shape not in ((part,), (x._width,))):
                raise ValueError(
                    f"layer_norm: {vector and vector.shape} numbers for {parts} parts of rows of {x._width}"
                )
        return self._record(x._axis, x._width, "layer_norm", x, weight, bias, eps, parts)

    def linear(
        self,
        x: Handle,
        weight: RecordedWeight,
        bias: RecordedWeight | None = None,
        residual: Handle | None = None,
    ) -> Handle:
        out, width = weight.shape
        _fit("linear", x, x._axis, width)
        _fit_bias("linear", bias, out)
        if residual is not None:
            _fit("linear's residual", residual, x._axis, out)
        return self._record(x._axis, out, "linear", x, weight, bias, residual)

    def rope_and_cache(self, q: Handle, k: Handle, v: Handle, layer: int, rope: Rope) -> Handle:
        group = self._layout.groups[self._layout.of_layer(layer)[0]]
        _fit("rope_and_cache's k", k, "tokens", group.heads * group.key_width)
        _fit("rope_and_cache's v", v, "tokens", group.heads * group.value_width)
        self._heads(q, layer)
        if 2 * len(rope.inv_freq) > group.key_width:
            raise ValueError(f"rope of {len(rope.inv_freq)} pairs for heads of width {group.key_width}")
        return self._record("tokens", q._width, "rope_and_cache", q, k, v, layer, rope)

    def attention(
        self, q: Handle, layer: int, scale: float, softcap: float = 0.0, sinks: RecordedWeight | None = None
    ) -> Handle:
        group = self._layout.groups[self._layout.of_layer(layer)[0]]
        heads = self._heads(q, layer)
        if sinks is not None and sinks.shape != (heads,):
            raise ValueError(f"attention: sinks of shape {sinks.shape} for {heads} heads")
        return self._record("tokens", heads * group.value_width, "attention", q, layer, scale, softcap, sinks)

    def _heads(self, q: Handle, layer: int) -> int:
        """Query heads; a multiple of the layer's key/value heads."""
        group = self._layout.groups[self._layout.of_layer(layer)[0]]
        heads, rest = divmod(q._width, group.key_width)
        if q._axis != "tokens" or rest or heads % group.heads:
            raise ValueError(f"queries [{q._axis}, {q._width}] for {group.heads} heads of width {group.key_width}")
        return heads

    def gated_mlp(
        self,
        x: Handle,
        gate: RecordedWeight,
        up: RecordedWeight,
        down: RecordedWeight,
        activation: str,
        residual: Handle | None = None,
        gate_bias: RecordedWeight | None = None,
        up_bias: RecordedWeight | None = None,
        down_bias: RecordedWeight | None = None,
    ) -> Handle:
        _fit("gated_mlp", x, x._axis, gate.shape[1])
        if up.shape != gate.shape or down.shape != gate.shape[::-1]:
            raise ValueError(f"gated_mlp: shapes {gate.shape}, {up.shape}, {down.shape} do not fit")
        if residual is not None:
            _fit("gated_mlp's residual", residual, x._axis, x._width)
        biases = (gate_bias, up_bias, down_bias)
        for bias, weight in zip(biases, (gate, up, down), strict=True):
            _fit_bias("gated_mlp", bias, weight.shape[0])
        self._note(x._axis, gate.shape[0])
        return self._record(x._axis, x._width, "gated_mlp", x, gate, up, down, activation, residual, *biases)

    def activate(self, x: Handle, activation: str) -> Handle:
        return self._record(x._axis, x._width, "activate", x, activation)

    def gated(self, gate: Handle, up: Handle, activation: str) -> Handle:
        _fit("gated", up, gate._axis, gate._width)
        return self._record(gate._axis, gate._width, "gated", gate, up, activation)

    def add_low_rank(self, y: Handle, x: Handle, slots: AdapterSlots) -> Handle:
        _fit("add_low_rank", x, "tokens", x._width)
        _fit("add_low_rank", y, "tokens", y._width)
        return self._record("tokens", y._width, "add_low_rank", y, x, slots)

    def experts(
        self,
        x: Handle,
        router: RecordedWeight,
        gate: RecordedWeight,
        up: RecordedWeight,
        down: RecordedWeight,
        routing: Routing,
        activation: str | ClampedSwiGLU,
        router_bias: RecordedWeight | None = None,
        correction: RecordedWeight | None = None,
        gate_bias: RecordedWeight | None = None,
        up_bias: RecordedWeight | None = None,
        down_bias: RecordedWeight | None = None,
        residual: Handle | None = None,
    ) -> Handle:
        count, width, size = gate.shape
        _fit("experts", x, x._axis, size)
        if router.shape != (count, size) or up.shape != gate.shape or down.shape != (count, size, width):
            raise ValueError(f"experts: shapes {router.shape}, {gate.shape}, {up.shape}, {down.shape} do not fit")
        biases = [(router_bias, count), (correction, count), (gate_bias, count * width), (up_bias, count * width)]
        for bias, length in [*biases, (down_bias, count * size)]:
            if bias is not None and bias.shape != (length,):
                raise ValueError(f"experts: a bias of shape {bias.shape} for {length} numbers")
        if not routing.active <= routing.kept_groups * (count // routing.groups) or count % routing.groups:
            raise ValueError(f"experts: {count} experts are too few for {routing}")
        if residual is not None:
            _fit("experts' residual", residual, x._axis, size)
        self._note(x._axis, routing.active * max(width, size))
        biased = (router_bias, correction, gate_bias, up_bias, down_bias)
        return self._record(x._axis, size, "experts", x, router, gate, up, down, routing, activation, *biased, residual)

    def sigmoid_gate(self, x: Handle, gate: Handle, residual: Handle | None = None) -> Handle:
        _fit("sigmoid_gate", gate, x._axis, 1)
        if residual is not None:
            _fit("sigmoid_gate's residual", residual, x._axis, x._width)
        return self._record(x._axis, x._width, "sigmoid_gate", x, gate, residual)

    def latent_attention(
        self,
        q: Handle,
        latent: Handle,
        norm: RecordedWeight,
        key_up: RecordedWeight,
        value_up: RecordedWeight,
        layer: int,
        scale: float,
        rope: Rope,
        eps: float,
    ) -> Handle:
        group = self._layout.groups[self._layout.of_layer(layer)[0]]
        (heads, rank, plain), (value_heads, width, value_rank) = key_up.shape, value_up.shape
        if group.kind != "latent" or norm.shape != (rank,) or (value_heads, value_rank) != (heads, rank):
            raise ValueError(
                f"latent_attention: {norm.shape}, {key_up.shape}, {value_up.shape} do not fit {group.kind}"
            )
        if (group.value_width, group.key_width) != (rank, 2 * len(rope.inv_freq)):
            raise ValueError(f"latent_attention: {rank} and {2 * len(rope.inv_freq)} numbers are not what is cached")
        _fit("latent_attention", q, "tokens", heads * (plain + group.key_width))
        _fit("latent_attention's latent", latent, "tokens", rank + group.key_width)
        self._note("tokens", heads * (rank + group.key_width))
        arguments = (q, latent, norm, key_up, value_up, layer, scale, rope, eps)
        return self._record("tokens", heads * width, "latent_attention", *arguments)

    def logit_rows(self, x: Handle) -> Handle:
        _fit("logit_rows", x, "tokens", x._width)
        return self._record("rows", x._width, "logit_rows", x)

    def pool_rows(self, x: Handle) -> Handle:
        _fit("pool_rows", x, "tokens", x._width)
        return self._record("pooled", x._width, "pool_rows", x)

    def pooled(self, x: Handle) -> None:
        _fit("pooled", x, "pooled", x._width)
        self._record("pooled", x._width, "pooled", x)

    def logits(
        self,
        x: Handle,
        head: RecordedWeight,
        scale: float = 1.0,
        softcap: float = 0.0,
        bias: RecordedWeight | None = None,
    ) -> Handle:
        _fit("logits", x, "rows", head.shape[1])
        _fit_bias("logits", bias, head.shape[0])
        return self._record("rows", head.shape[0], "logits", x, head, scale, softcap, bias)

    def all_reduce(self, x: Handle) -> Handle:
        return self._record(x._axis, x._width, "all_reduce", x)

    def _record(self, axis: str, width: int, name: str, *arguments: Any) -> Handle:
        self._note(axis, width)
        self.calls.append(Call(name, arguments))
        return Handle(len(self.calls) - 1, axis, width)

    def _note(self, axis: str, width: int) -> None:
        self.widths[axis] = max(self.widths[axis], width)


def _fit_bias(what: str, bias: RecordedWeight | None, outputs: int) -> None:
    if bias is not None and bias.shape != (outputs,):
        raise ValueError(f"{what}: a bias of shape {bias.shape} for {outputs} outputs")


def _fit(what: str, x: Handle, axis: str, width: int) -> None:
    if (x._axis, x._width) != (axis, width):
        raise ValueError(f"{what}: [{x._axis}, {x._width}] where [{axis}, {width}] is needed")
