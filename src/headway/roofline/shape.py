"""The shape of a model: what the step-time model, the memory plan and the cache need to know of it, and no weights.

`kv_bytes` is the only place in Headway that knows bytes of cache; capacity, time, pool sizes and cost all call it.
"""

from __future__ import annotations

import msgspec


class KVGroup(msgspec.Struct, frozen=True):
    """Layers that cache the same thing in the same way; they share one block-id space.

    Attributes:
        kind: "full" (every position), "window" (the last `window` positions), "latent" (one vector per token, not
            split over GPUs), or "state" (constant size, whatever the length).
        layers: indices of its layers in the model.
        heads: key/value heads per layer; what tensor parallelism can split.
        key_width, value_width: numbers cached per token, layer and head.
        window: positions kept, for kind "window".
        dtype_bytes: bytes per cached number.
    """

    kind: str
    layers: tuple[int, ...]
    heads: int
    key_width: int
    value_width: int
    window: int | None = None
    dtype_bytes: float = 2.0

    @property
    def row_width(self) -> int:
        """Numbers cached per token and layer."""
        return self.heads * (self.key_width + self.value_width)
