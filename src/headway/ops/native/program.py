"""A family's calls, recorded as a program of the compiled module, and that program run step after step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.ops.protocol import AdapterSlots, Prepared, Rope, StepBatch
from headway.ops.routing import ClampedSwiGLU, Routing
from headway.sampling.logits import Logits


@dataclass(frozen=True)
class Value:
    """A value of the program that is built."""

    number: int


class NativeProgram:
    """A recorded forward pass.

    Attributes:
        pooled: as `Program.pooled`.
        seconds: of the last step, by kind of operation.
    """

    def __init__(self, program: Any) -> None:
        self._program = program
        self.pooled = np.zeros((0, 0), np.float32)

    def step_bytes(self, tokens: int, rows: int, logit_rows: int, cached: int, longest: int) -> int:
        return self._program.step_bytes(tokens, rows, logit_rows, cached)

    def run(self, batch: StepBatch) -> Logits:
        rows, peaks, logsumexp, self.pooled = self._program.run(
            batch.ids,
            batch.positions,
            batch.query_start,
            batch.kv_len if batch.known is None else batch.known,
            batch.logit_index,
            [group.block_table for group in batch.groups],
            [group.slots for group in batch.groups],
            batch.adapter,
            batch.pool_index,
        )
        return Logits(rows, peaks, logsumexp)

    @property
    def experts(self) -> tuple[int, ...]:
        return tuple(self._program.touched)

    @property
    def seconds(self) -> dict[str, float]:
        return dict(self._program.seconds)


class NativeOps:
    """`Ops` that appends to a program. Widths and axes are checked there."""

    def __init__(self, module: Any, program: Any) -> None:
        self._module = module
        self._program = program

    def embed(self, table: Prepared, scale: float = 1.0, positions: Prepared | None = None) -> Value:
        return Value(self._program.embed(table, scale, positions))

    def rms_norm(self, x: Value, weight: Prepared, eps: float, residual: Value | None = None) -> Value:
        return Value(self._program.rms_norm(x.number, weight, eps, _number(residual)))

    def layer_norm(self, x: Value, weight: Prepared, bias: Prepared | None, eps: float, parts: int = 1) -> Value:
        return Value(self._program.layer_norm(x.number, weight, bias, eps, parts))

    def linear(self, x: Value, weight: Prepared, bias: Prepared | None = None, residual: Value | None = None) -> Value:
        return Value(self._program.linear(x.number, weight, bias, _number(residual)))

    def rope_and_cache(self, q: Value, k: Value, v: Value, layer: int, rope: Rope) -> Value:
        return Value(self._program.rope_and_cache(q.number, k.number, v.number, layer, self._rope(rope)))

    def _rope(self, rope: Rope) -> Any:
        return self._module.Rope(rope.inv_freq, rope.interleaved, rope.magnitude, rope.longer, rope.original)

    def attention(
        self, q: Value, layer: int, scale: float, softcap: float = 0.0, sinks: Prepared | None = None
    ) -> Value:
        return Value(self._program.attention(q.number, layer, scale, softcap, sinks))

    def gated_mlp(
        self,
        x: Value,
        gate: Prepared,
        up: Prepared,
        down: Prepared,
        activation: str,
        residual: Value | None = None,
        gate_bias: Prepared | None = None,
        up_bias: Prepared | None = None,
        down_bias: Prepared | None = None,
    ) -> Value:
        kind = getattr(self._module.Activation, activation)
        biases = (gate_bias, up_bias, down_bias)
        return Value(self._program.gated_mlp(x.number, gate, up, down, kind, _number(residual), *biases))

    def activate(self, x: Value, activation: str) -> Value:
        return Value(self._program.gated(x.number, -1, getattr(self._module.Activation, activation)))

    def gated(self, gate: Value, up: Value, activation: str) -> Value:
        return Value(self._program.gated(gate.number, up.number, getattr(self._module.Activation, activation)))

    def add_low_rank(self, y: Value, x: Value, slots: AdapterSlots) -> Value:
        return Value(self._program.add_low_rank(y.number, x.number, slots))

    def experts(
        self,
        x: Value,
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
        residual: Value | None = None,
    ) -> Value:
        clamp = (activation.alpha, activation.limit) if isinstance(activation, ClampedSwiGLU) else (0.0, 0.0)
        kind = getattr(self._module.Activation, activation if isinstance(activation, str) else "silu")
        biases = (router_bias, correction, gate_bias, up_bias, down_bias)
        how = self._module.Routing(**vars(routing))
        return Value(
            self._program.experts(x.number, router, gate, up, down, how, kind, *clamp, *biases, _number(residual))
        )

    def sigmoid_gate(self, x: Value, gate: Value, residual: Value | None = None) -> Value:
        return Value(self._program.sigmoid_gate(x.number, gate.number, _number(residual)))

    def latent_attention(
        self,
        q: Value,
        latent: Value,
        norm: Prepared,
        key_up: Prepared,
        value_up: Prepared,
        layer: int,
        scale: float,
        rope: Rope,
        eps: float,
    ) -> Value:
        turn = self._rope(rope)
        return Value(
            self._program.latent_attention(q.number, latent.number, norm, key_up, value_up, layer, scale, turn, eps)
        )

    def logit_rows(self, x: Value) -> Value:
        return Value(self._program.logit_rows(x.number))

    def pool_rows(self, x: Value) -> Value:
        return Value(self._program.pool_rows(x.number))

    def pooled(self, x: Value) -> None:
        self._program.pooled(x.number)

    def logits(
        self, x: Value, head: Prepared, scale: float = 1.0, softcap: float = 0.0, bias: Prepared | None = None
    ) -> Value:
        return Value(self._program.logits(x.number, head, scale, softcap, bias))

    def all_reduce(self, x: Value) -> Value:
        return Value(self._program.all_reduce(x.number))


def _number(handle: Value | None) -> int:
    return -1 if handle is None else handle.number
