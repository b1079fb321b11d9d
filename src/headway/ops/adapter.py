"""Adapters (LoRA) as a wrapper of `linear`: families know nothing of them.

    forward(AdaptedOps(ops))      where the weights of linear layers are `Adapted`

A row with adapter n gets scale * up @ down @ x added to the output of every layer whose slots hold matrices for n (Hu
et al. 2021). Gated MLPs are taken apart for it; what rows without an adapter compute stays the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.ops.protocol import AdapterSlots, Forward, Ops, Prepared, Tensor


@dataclass(frozen=True)
class Adapted:
    """A prepared matrix, and what adapters add to its products."""

    weight: Prepared
    slots: AdapterSlots


class AdaptedOps:
    """`Ops` that adds what adapters say; all other operations are the inner ones."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops

    def linear(
        self, x: Tensor, weight: Prepared, bias: Prepared | None = None, residual: Tensor | None = None
    ) -> Tensor:
        if not isinstance(weight, Adapted):
            return self._ops.linear(x, weight, bias, residual)
        return self._ops.add_low_rank(self._ops.linear(x, weight.weight, bias, residual), x, weight.slots)

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
        hidden = self._ops.gated(self.linear(x, gate, gate_bias), self.linear(x, up, up_bias), activation)
        return self.linear(hidden, down, down_bias, residual)

    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        return getattr(self._ops, name)


def adapted(forward: Forward) -> Forward:
    """The forward pass of a family whose weights may be `Adapted`."""
    return lambda ops: forward(AdaptedOps(ops))


def linear_layers(forward: Forward) -> list[Prepared]:
    """The matrices that a forward pass multiplies by `linear` and `gated_mlp`: where adapters can add."""
    listing = _Listing()
    forward(listing)
    return listing.found


class _Listing:
    """An `Ops` that computes nothing and notes the weights of linear layers."""

    def __init__(self) -> None:
        self.found: list[Prepared] = []

    def linear(self, x: Tensor, weight: Prepared, *others: Any, **named: Any) -> None:
        self.found.append(weight)

    def gated_mlp(self, x: Tensor, gate: Prepared, up: Prepared, down: Prepared, *others: Any, **named: Any) -> None:
        self.found += [gate, up, down]

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **named: None
