"""The memory plan: where every byte of a device goes. The engine starts from it, the planner and the simulator ask it.

    usable memory = weights + adapters + activations of the largest step + reserve + cache + left

`usable` is `Hardware.usable` of a catalogued device, and what the machine has free for a process that runs on it. All
figures are bytes of one device of a replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor

import msgspec

from headway.core.errors import BadInput
from headway.core.step import blocks_held
from headway.roofline.hardware import GIB, Hardware
from headway.roofline.work import Layout
from headway.shape.model import KVGroup, ModelShape

ALONE = Layout()
UNBOUNDED = 1 << 24  # a batch nobody runs: what fits where a sequence costs nothing
STEP_TOKENS = 8192  # new tokens of the largest step, by default, of the engines that are planned
RUNTIME = 0.55 * GIB  # of a GPU: the driver's context, allocator's slack, kernels
EXCHANGE = 1e9  # of a GPU that works with others: communication buffers
GRAMMARS = 96 << 20  # of our own engine: what compiled grammars may take
PROCESS = 0.25 * GIB + GRAMMARS  # of it on a CPU: interpreter, libraries, tokenizer, allocator's slack as well
MOST_BLOCKS = 1 << 18  # of a pool, if nobody says how large: a file may claim any context
LARGEST_SHARE = 4  # one in so many bytes is the cache's share of what is free, if nobody says: the machine is not ours


class MemoryPlan(msgspec.Struct, frozen=True):
    """Bytes of one device by purpose.

    Attributes:
        usable: all there is to divide.
        weights, activations, reserve: what is taken before the cache; reserve: runtime, libraries, whatever else.
        adapters: what is kept for those that may be loaded. draft: weights of the model that drafts.
        cache: bytes of all blocks of all groups; 0 while no pools are cut. draft_cache: of it, the draft model's.
        blocks: of each KV group's pool. block_size: tokens per block.
        tokens: of context that fit at once. longest: of one sequence that fits.
    """

    usable: float
    weights: float
    activations: float = 0.0
    reserve: float = 0.0
    cache: float = 0.0
    blocks: tuple[int, ...] = ()
    block_size: int = 0
    tokens: int = 0
    longest: int = 0
    adapters: float = 0.0
    draft: float = 0.0
    draft_cache: float = 0.0

    @property
    def room(self) -> float:
        """Bytes that caches may take, below 0 if the rest does not fit."""
        return self.usable - self.weights - self.draft - self.adapters - self.activations - self.reserve

    def sequences(self, bytes_each: float) -> int:
        """How many caches of `bytes_each` fit (B6)."""
        if self.room < 0:
            return 0
        return UNBOUNDED if bytes_each == 0 else floor(self.room / bytes_each)

    def lines(self) -> list[tuple[str, str]]:
        """(label, amount) pairs to print."""
        pools = " + ".join(map(str, self.blocks))
        cache = f"{_gib(self.cache)}, {pools} blocks of {self.block_size} = {self.tokens} tokens"
        drafting = f"{_gib(self.draft)}, and {_gib(self.draft_cache)} of the KV cache"
        draft = [("draft model", drafting)] if self.draft else []
        adapters = [("adapters", _gib(self.adapters))] if self.adapters else []
        return [
            ("usable memory", _gib(self.usable)), ("weights", _gib(self.weights)), *draft, *adapters,
            ("activations", _gib(self.activations)), ("KV cache", cache), ("reserve", _gib(self.reserve)),
            ("left free", _gib(self.room - self.cache)),
        ]  # fmt: skip

    def spent(self) -> str:
        """Where it went, in a sentence about a cache that does not fit."""
        adapters = f"{self.adapters / GIB:.2f} for adapters, " if self.adapters else ""
        adapters += f"{self.draft / GIB:.2f} for the draft model, " if self.draft else ""
        return (
            f"at most {_gib(max(self.room, 0))} are left for it of {_gib(self.usable)} free, after weights of "
            f"{self.weights / GIB:.2f}, {adapters}{self.activations / GIB:.2f} for a step's activations and "
            f"{self.reserve / GIB:.2f} in reserve"
        )


def _gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB"


def replica_memory(
    shape: ModelShape, device: Hardware, layout: Layout = ALONE, step_tokens: int = STEP_TOKENS
) -> MemoryPlan:
    """One GPU of a replica that vLLM, SGLang or TensorRT-LLM serves: what these keep besides weights and cache."""
    gpus = layout.gpus
    reserve = PROCESS if device.kind == "cpu" else RUNTIME + (EXCHANGE if gpus > 1 else 0.0)
    activations = activation_bytes(shape, step_tokens, layout.stage)
    return MemoryPlan(device.usable, weights_per_gpu(shape, layout), activations, reserve)


def weights_per_gpu(shape: ModelShape, layout: Layout) -> float:
    """Matrices are split over a group's GPUs, of which each of `attention_dp` has its copy of all but the routed
    experts; these are split over all of a stage. Where expert groups do not divide the experts, some are held twice
    (DeepSeek's units of 144 GPUs hold two each, 288 of 256)."""
    experts, n, groups = shape.stored.experts, layout.gpus, layout.expert_parallel
    twice = ceil(shape.moe.experts / groups) * groups / shape.moe.experts if shape.moe else 1.0
    return (shape.stored.total - experts) * layout.attention_dp / n + experts * twice / n


def activation_bytes(shape: ModelShape, tokens: int, gpus: int = 1) -> float:
    """Activations alive at once in the largest step of `tokens` new tokens: residual and its norm (2 d), the widest
    matrix's input and output (2 times the gate and up width, or query, key and value), 16 bits each, and float32
    logits of up to 256 rows with one copy for sampling."""
    passed = shape.params.mlp + shape.params.shared + shape.n_routed
    ffn = passed / (3.0 * shape.d_model * shape.layers)  # mean width a token passes, from the parameters themselves
    heads = shape.heads + 2 * shape.kv_heads
    widest = max(2 * ffn, heads * shape.head_width) / gpus
    return 2.0 * tokens * (2 * shape.d_model + 2 * widest) + 2 * logit_bytes(shape, min(tokens, 256))


def shares(usable: float, needs: Sequence[float]) -> list[float]:
    """What each of several engines on one device may use: its need, and an equal part of what all needs leave."""
    left = usable - sum(needs)
    return [need + left / len(needs) for need in needs]


def logit_bytes(shape: ModelShape, rows: int) -> int:
    """Logits of so many rows; a sampler keeps a copy of them."""
    return 4 * rows * shape.vocab


def cut_pools(
    plan: MemoryPlan,
    groups: Sequence[KVGroup],
    block_bytes: Sequence[float],
    *,
    block_size: int,
    max_rows: int,
    max_len: int,
    step_tokens: int,
    kv_cache_gib: float | None = None,
    least_windows: bool = False,
) -> MemoryPlan:
    """The plan with its cache cut into one pool per KV group. Without `kv_cache_gib` the cache is what `max_rows` rows
    at full context hold, but at most a quarter of the room. A window's pool is no larger than those rows ever need.

    Args:
        block_bytes: of one block of each group, as the backend allocates it.
        least_windows: a window's pool is no larger than rows need that share the new tokens of a step, as where pools
            lend each other their blocks: the rest is for the groups that grow with the context.

    Raises:
        BadInput: the wanted cache does not fit, or not even two blocks do.
    """
    room = max(plan.room, 0.0)
    if kv_cache_gib is not None and kv_cache_gib * GIB > room:
        raise BadInput("--kv-cache-gib", f"{kv_cache_gib:g} does not fit: {plan.spent()}")
    one_row = [blocks_held(max_len, group.window, block_size, step_tokens) for group in groups]
    most = [min(max_rows * (blocks + 1), MOST_BLOCKS) for blocks in one_row]
    if least_windows:  # of each row its window, not aligned, a block of it begun and one of headroom
        shared = ceil(step_tokens / block_size)
        seen = [ceil(group.window / block_size) if group.window else UNBOUNDED for group in groups]
        most = [min(limit, max_rows * (window + 3) + shared) for limit, window in zip(most, seen, strict=True)]
    if kv_cache_gib is not None:  # prefixes may fill the rest
        room = kv_cache_gib * GIB
        most = [blocks if group.window else UNBOUNDED for group, blocks in zip(groups, most, strict=True)]
    else:
        room /= LARGEST_SHARE
    level = _level(most, block_bytes, room)
    if level < 2:
        need = 2 * sum(block_bytes) / GIB
        raise BadInput("--kv-cache-gib", f"the cache needs at least {need:.3g} GiB (two blocks): {plan.spent()}")
    blocks = tuple(min(level, limit) for limit in most)
    return msgspec.structs.replace(
        plan, blocks=blocks, block_size=block_size, tokens=level * block_size,
        cache=sum(n * each for n, each in zip(blocks, block_bytes, strict=True)),
        longest=min(n * block_size if n < row else max_len for n, row in zip(blocks, one_row, strict=True)),
    )  # fmt: skip


def _level(most: Sequence[int], block_bytes: Sequence[float], room: float) -> int:
    """The largest n such that min(n, most) blocks of every group fit in `room`; the largest of `most` if all do."""
    level = 0
    for limit in sorted(set(most)):
        growing = sum(each for n, each in zip(most, block_bytes, strict=True) if n >= limit)
        step = min(limit - level, floor(room / growing))
        level, room = level + step, room - step * growing
        if level < limit:
            break
    return level
