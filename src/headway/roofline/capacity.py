"""How many sequences a replica serves at once (B6): what memory holds, what the promised speed allows."""

from __future__ import annotations

from collections.abc import Callable
from math import floor

import msgspec

from headway.core.errors import BadInput
from headway.roofline.exact import step_time
from headway.roofline.hardware import GIB
from headway.roofline.step import COMPUTE_TERMS, MEMORY_TERMS, StepTime, decode_step
from headway.roofline.textbook import Replica, cache_bytes, decode
from headway.shape.model import ModelShape, block_bytes, kv_bytes

UNBOUNDED = 1 << 24  # a batch nobody runs; searched up to here when a sequence costs nothing


class Capacity(msgspec.Struct, frozen=True):
    """The largest batch and its limits.

    Attributes:
        batch: the answer, 0 if not even one sequence is possible.
        limited_by: "memory", "tpot-memory", "tpot-compute", or "nothing fits" when the batch is 0.
        because: the smallest of the three limits, also when the batch is 0.
        memory_batch, tpot_memory_batch, tpot_compute_batch: each limit alone (None = no TPOT target).
        free_bytes: what is left for the cache.
        bytes_per_sequence: cache of one sequence at this context.
    """

    batch: int
    limited_by: str
    because: str
    memory_batch: int
    tpot_memory_batch: int | None
    tpot_compute_batch: int | None
    free_bytes: float
    bytes_per_sequence: float


def free_bytes(d: Replica, reserve: float = 0.0) -> float:
    """n*C_HBM - M_W - M_act."""
    return d.gpus * d.hardware.memory - d.weights - reserve


def memory_batch(d: Replica, context: float, reserve: float = 0.0) -> int:
    """B_mem = floor((n*C_HBM - M_W - M_act) / (T*m_KV)), 0 if negative (B6); in exact mode per GPU."""
    if d.exact:
        return exact_memory_batch(step_time(d).shape, d.hardware.room, context, d.gpus, reserve / d.gpus)
    free = free_bytes(d, reserve)
    per_sequence = cache_bytes(d, context)
    if free < 0:
        return 0
    return UNBOUNDED if per_sequence == 0 else floor(free / per_sequence)


def capacity(d: Replica, context: float, tpot: float | None = None, reserve: float = 0.0) -> Capacity:
    """The largest batch that fits in memory and keeps each step within `tpot` seconds, and what limits it (B6).

    Each line of the max bounds the batch separately: t_W(B) + B*t_K <= TPOT, and B*t_F <= TPOT.
    """
    if d.exact:
        return exact_capacity(step_time(d), round(context), tpot, reserve / d.gpus, d.overhead)
    _check_target(tpot)
    in_memory = memory_batch(d, context, reserve)
    by_read = by_work = None
    if tpot is not None:
        by_read = _within(d, context, tpot, ("weights", "kv"))
        by_work = _within(d, context, tpot, ("arithmetic", "attention"))
    limits: dict[str, int | None] = {"memory": in_memory, "tpot-memory": by_read, "tpot-compute": by_work}
    return Capacity(*_smallest(limits), in_memory, by_read, by_work, free_bytes(d, reserve), cache_bytes(d, context))


def exact_capacity(
    model: StepTime, context: int, tpot: float | None, reserve: float = 0.0, overhead: float = 0.0
) -> Capacity:
    """The same in exact mode: memory per GPU, caches split by head; times of the model `model`. `reserve`: bytes per
    GPU kept for other things. `overhead`: seconds added to every step."""
    _check_target(tpot)
    shape, gpus = model.shape, model.layout.gpus
    in_memory = exact_memory_batch(shape, model.hardware.room, context, gpus, reserve)

    def side(names: tuple[str, ...]) -> int | None:
        if tpot is None:
            return None
        allowed = tpot * (1 + 1e-12) - overhead

        def fits(batch: int) -> bool:
            terms = model.explain(decode_step(shape, batch, context)).terms
            return sum(terms.get(name, 0.0) for name in (*names, "all_reduce", "overhead")) <= allowed

        return _largest(fits)

    by_read, by_work = side(MEMORY_TERMS), side(COMPUTE_TERMS)
    limits: dict[str, int | None] = {"memory": in_memory, "tpot-memory": by_read, "tpot-compute": by_work}
    free = gpus * (model.hardware.room - reserve) - shape.stored.total
    return Capacity(*_smallest(limits), in_memory, by_read, by_work, free, kv_bytes(shape, context, gpus) * gpus)


def _smallest(limits: dict[str, int | None]) -> tuple[int, str, str]:
    """(the smallest limit, what the answer is limited by, that limit's name)."""
    named = {name: value for name, value in limits.items() if value is not None}
    smallest = min(named, key=lambda name: named[name])
    batch = named[smallest]
    return batch, smallest if batch else "nothing fits", smallest


def _check_target(tpot: float | None) -> None:
    if tpot is not None and not tpot > 0:
        raise BadInput("--tpot-ms", f"{tpot * 1e3:g}; accepted: a number above 0")


def _within(d: Replica, context: float, tpot: float, side: tuple[str, str]) -> int:
    """Largest batch whose `side` of the roofline, with communication and overhead, stays within `tpot`."""

    def fits(batch: int) -> bool:
        terms = decode(d, batch, context).terms
        # a hair of tolerance, so that a target computed as exactly k steps admits k
        return sum(terms[name] for name in (*side, "all_reduce", "overhead")) <= tpot * (1 + 1e-12)

    return _largest(fits)


def _largest(fits: Callable[[int], bool]) -> int:
    """Largest batch that fits, given that every smaller one does."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high < UNBOUNDED and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class Reserve(msgspec.Struct, frozen=True):
    """Memory of one GPU that holds neither weights, cache nor the step's activations, in bytes.

    runtime: the driver's context, the allocator's slack, compiled kernels and communication buffers: about half a GiB
    on one GPU. graphs: captured graphs; 0, because vLLM sizes its cache before it captures them, so that they lie in
    the share of memory that `utilisation` leaves out. Give a figure for an engine that counts them.
    """

    runtime: float = 0.55 * GIB
    graphs: float = 0.0


def activation_bytes(shape: ModelShape, tokens: int, gpus: int = 1) -> float:
    """Activations alive at once in the largest step of `tokens` new tokens: residual and its norm (2 d), the widest
    matrix's input and output (2 times the gate and up width, or query, key and value), 16 bits each, and float32
    logits of up to 256 rows with one copy for sampling."""
    heads = shape.heads * shape.head_width
    widest = max(2 * _ffn_width(shape), heads + 2 * shape.kv_heads * shape.head_width) / gpus
    rows = min(tokens, 256)
    return 2.0 * tokens * (2 * shape.d_model + 2 * widest) + 2 * 4.0 * rows * shape.vocab


def _ffn_width(shape: ModelShape) -> float:
    """Mean width of the feed-forward layers a token passes, from the parameters themselves."""
    passed = shape.params.mlp + shape.params.shared + shape.n_routed
    return passed / (3.0 * shape.d_model * shape.layers)


def kv_blocks(
    shape: ModelShape,
    memory: float,
    utilisation: float,
    block_size: int,
    *,
    gpus: int = 1,
    step_tokens: int = 8192,
    reserve: Reserve | None = None,
    weights: float | None = None,
) -> int:
    """Blocks of `block_size` tokens an engine finds room for on each GPU (B6, exact mode):
    (memory * utilisation - M_W/n - activations - reserve) / bytes of a block."""
    kept = reserve or Reserve()
    held = (shape.stored.total if weights is None else weights) / gpus
    activations = activation_bytes(shape, step_tokens, gpus)
    free = memory * utilisation - held - activations - kept.runtime - kept.graphs
    each = sum(block_bytes(group, block_size, gpus) for group in shape.groups if group.kind != "state")
    return max(0, floor(free / each)) if each else 0


def exact_memory_batch(shape: ModelShape, memory: float, context: float, gpus: int, reserve: float = 0.0) -> int:
    """B6 per GPU: (C - M_W/n - M_act) / (T*m_KV/min(n, n_kv)), latent caches unsplit."""
    free = memory - shape.stored.total / gpus - reserve
    per_sequence = kv_bytes(shape, context, gpus)
    if free < 0:
        return 0
    return UNBOUNDED if per_sequence == 0 else floor(free / per_sequence)
