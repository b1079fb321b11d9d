"""The memory plan: where every byte of a serving process goes, computed before anything is allocated.

    free memory = weights + activations of the largest step + KV blocks + reserve + left free

One knob, `--kv-cache-gib`; without it the cache takes what the largest batch can use, but never more than a quarter
of what the other terms leave: the machine may not be ours alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.core.errors import BadInput
from headway.shape.model import KVGroup, block_bytes

GIB = 1024**3
RESERVE = GIB // 4  # interpreter, libraries, tokenizer, allocator slack


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per purpose, and the blocks they buy.

    Attributes:
        free: bytes the process may take.
        weights, activations, reserve: bytes.
        kv: bytes of all blocks of all groups.
        blocks: per KV group.
        block_size: tokens per block.
    """

    free: int
    weights: int
    activations: int
    kv: int
    reserve: int
    blocks: tuple[int, ...]
    block_size: int

    @property
    def tokens(self) -> int:
        """Tokens of context that fit at once (of the group that fills first)."""
        return min(self.blocks) * self.block_size

    def lines(self) -> list[tuple[str, str]]:
        """(label, amount) pairs to print."""
        gib = {"weights": self.weights, "activations": self.activations, "KV cache": self.kv, "reserve": self.reserve}
        rows = [(label, f"{value / GIB:.2f} GiB") for label, value in gib.items()]
        rows[2] = ("KV cache", f"{rows[2][1]}, {min(self.blocks)} blocks of {self.block_size} = {self.tokens} tokens")
        return [*rows, ("left free", f"{(self.free - sum(gib.values())) / GIB:.2f} GiB")]


def plan_memory(
    groups: tuple[KVGroup, ...],
    *,
    block_size: int,
    max_rows: int,
    max_len: int,
    weights: int,
    activations: int,
    free: int,
    kv_cache_gib: float | None = None,
) -> MemoryPlan:
    """Divide `free` bytes.

    Raises:
        BadInput: the wanted cache does not fit, or not even one request at full context does.
    """
    per_block = sum(block_bytes(group, block_size) for group in groups)
    left = free - weights - activations - RESERVE
    full_row = -(-max_len // block_size) + 1
    spent = (
        f"at most {max(left, 0) / GIB:.2f} GiB are left for it of {free / GIB:.2f} GiB free, after weights of "
        f"{weights / GIB:.2f}, {activations / GIB:.2f} for a step's activations and {RESERVE / GIB:.2f} in reserve"
    )
    if kv_cache_gib is None:
        blocks = min(max_rows * full_row, int(left // 4 // per_block))
    else:
        if kv_cache_gib * GIB > max(left, 0):
            raise BadInput("--kv-cache-gib", f"{kv_cache_gib:g} does not fit: {spent}")
        blocks = int(kv_cache_gib * GIB // per_block)
    if blocks < 2:
        need = 2 * per_block / GIB
        raise BadInput("--kv-cache-gib", f"the cache needs at least {need:.3g} GiB (two blocks): {spent}")
    return MemoryPlan(
        free=free,
        weights=weights,
        activations=activations,
        kv=int(blocks * per_block),
        reserve=RESERVE,
        blocks=(blocks,) * len(groups),
        block_size=block_size,
    )


def activation_bytes(hidden: int, intermediate: int, vocab: int, tokens: int, logit_rows: int) -> int:
    """Bytes of float32 activations alive at once in the largest step: the residual stream with its norm, queries, keys,
    values and attention output (about 6 hidden-wide arrays), gate, up and their product, then the logits with one
    working copy for the sampler."""
    return 4 * (tokens * (6 * hidden + 3 * intermediate) + 2 * logit_rows * vocab)
