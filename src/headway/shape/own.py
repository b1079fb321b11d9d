"""Families whose layers are no common decoder's: each lists its own tensors and caches, in a file of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from headway.core.fields import Fields
from headway.shape import deepseek_v4, gemma3n, gemma4, kimi_linear, llama4, minimax, nemotron_h
from headway.shape.model import KVGroup
from headway.shape.tensors import Dims, Tensor


class Lister(Protocol):
    """A module that knows a family: its tensors, its KV groups, and which layers have routed experts."""

    def tensors(self, fields: Fields, size: Dims) -> Iterator[Tensor]: ...

    def groups(self, fields: Fields, size: Dims, kv_bytes: float) -> tuple[KVGroup, ...]: ...

    def sparse(self, fields: Fields, size: Dims) -> list[bool]: ...


OWN: Mapping[str, Lister] = {
    "deepseek_v4": deepseek_v4, "gemma3n": gemma3n, "gemma4": gemma4, "kimi_linear": kimi_linear, "llama4": llama4,
    "minimax": minimax, "nemotron_h": nemotron_h,
}  # fmt: skip
