"""What a decoder family makes of a checkpoint; the only thing loading knows of families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from headway.ops.protocol import Forward, Prepared
from headway.ops.weight import Weight
from headway.shape.model import KVGroup


class Config(Protocol):
    """What every family's config has."""

    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def tied(self) -> bool: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...


@dataclass(frozen=True)
class Decoder:
    """A checkpoint understood by its family; no tensor has been read.

    Attributes:
        config: the family's config.
        weights: the tensors to prepare, by role; each is needed once.
        parts: role of a weight -> the part it plays in a step, a field of `roofline.shape.ByRole`.
        groups: bytes per cached number -> what it caches.
        build: prepared weights by role -> the forward pass.
    """

    config: Config
    weights: dict[str, Weight]
    parts: dict[str, str]
    groups: Callable[[float], tuple[KVGroup, ...]]
    build: Callable[[Mapping[str, Prepared]], Forward]
