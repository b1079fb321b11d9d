"""What each `headway plan` verb answers, as plain data: the command line prints it, `--json` writes it, pages draw it.

Every answer says which mode made it and whether it is a bound or an estimate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from headway.core.errors import BadInput
from headway.core.step import StepShape
from headway.plan.models import load_device, load_shape
from headway.roofline import capacity as capacities
from headway.roofline.collectives import all_reduce_of
from headway.roofline.cost import price_ratio, price_table, token_cost
from headway.roofline.exact import step_time
from headway.roofline.frontier import frontier as trace_frontier
from headway.roofline.hardware import Hardware
from headway.roofline.levers import levers as lever_table
from headway.roofline.speculation import Draft
from headway.roofline.step import (
    ACTIVATION_BYTES,
    StepCost,
    StepTime,
    check_layout,
    decode_step,
    mixed_step,
    prefill_step,
)
from headway.roofline.textbook import (
    Replica,
    best_degree_continuous,
    decode,
    deploy,
    not_negative,
    prefill,
    share,
    tensor_parallel,
)

if TYPE_CHECKING:
    from headway.plan.estimates import Calibrated

BOUNDS = ("textbook", "exact")
MODES = (*BOUNDS, "calibrated")
LINK_LATENCY_US = 2.0  # per hop, the third text's illustrative figure


class Setup(msgspec.Struct, frozen=True):
    """The options all verbs share: what is deployed on what, and in which mode it is computed. A link latency or
    bandwidth without a kind of all-reduce means a ring."""

    model: str | None
    hardware: str | None
    gpus: int = 1
    precision: str | None = None
    kv: str | None = None
    math: str | None = None
    peak_tflops: float | None = None
    mode: str = "textbook"
    all_reduce: str | None = None
    link_latency_us: float | None = None
    link_gbs: float | None = None
    overhead_us: float = 0.0
    skew: float = 0.0
    engine: str = "vllm"

    def replica(self, modes: tuple[str, ...] = ("textbook",)) -> Replica:
        """The deployment. `modes`: what the verb can compute.

        Raises:
            BadInput: any option that is impossible, named as the user wrote it.
        """
        if self.mode not in modes:
            raise BadInput("--mode", f"{self.mode!r}; accepted by this verb: {', '.join(modes)}")
        if self.model is None:
            raise BadInput(
                "--model", "missing; a catalogued name, a hub id, a folder with config.json, or a .gguf file"
            )
        if self.hardware is None:
            raise BadInput("--hardware", "missing; a catalogued device, such as h100-sxm")
        device = load_device(self.hardware)
        replica = deploy(
            load_shape(self.model), device, self.gpus, precision=self.precision, kv=self.kv, math=self.math,
            peak=None if self.peak_tflops is None else self.peak_tflops * 1e12,
        )  # fmt: skip
        for field, value in (("--overhead-us", self.overhead_us), ("--skew", self.skew)):
            not_negative(field, value)
        check_layout(replica.shape, self.gpus)
        reduce = None
        if self.all_reduce or self.link_latency_us is not None or self.link_gbs is not None:
            reduce = all_reduce_of(self.all_reduce or "ring", self.link_bandwidth(device), self.link_seconds())
        return msgspec.structs.replace(
            replica, all_reduce=reduce, overhead=self.overhead_us * 1e-6, skew=self.skew, exact=self.mode != "textbook"
        )

    def link_seconds(self) -> float:
        latency = LINK_LATENCY_US if self.link_latency_us is None else self.link_latency_us
        not_negative("--link-latency-us", latency)
        return latency * 1e-6

    def link_bandwidth(self, device: Hardware) -> float:
        """B_link in bytes/s: as given, else of the device's own links."""
        if self.link_gbs is not None:
            if not 0 < self.link_gbs < float("inf"):
                raise BadInput("--link-gbs", f"{self.link_gbs}; accepted: a number above 0")
            return self.link_gbs * 1e9
        if device.link is None:
            raise BadInput("--link-gbs", f"{device.name} has no catalogued link; give its GB/s per direction")
        return device.link.bandwidth


def whole_from(least: int, field: str, value: int) -> None:
    """Refuse anything below `least`."""
    if value < least:
        raise BadInput(field, f"{value}; accepted: a whole number from {least}")


def heading(setup: Setup, replica: Replica) -> dict[str, Any]:
    """What an answer is about, the same keys in every one."""
    cached = {group.dtype_bytes for group in replica.shape.groups if group.kind != "state"}
    return {
        "model": replica.shape.name, "hardware": replica.hardware.name, "gpus": setup.gpus,
        "precision": replica.precision, "kv_bytes_per_number": max(cached, default=0.0), "math": replica.math,
        "mode": setup.mode, "kind": "bound",
    }  # fmt: skip


def step(
    setup: Setup, batch: int, context: int, mbu: float | None = None, chunk: int = 0, chunk_start: int = 0
) -> dict[str, Any]:
    """One decode step (B3), in exact modes also with `chunk` tokens of a prompt in it, of which `chunk_start` are
    computed already. With `mbu` the bound's roof is divided by it and the answer is an estimate."""
    replica = setup.replica(MODES)
    answer = heading(setup, replica)
    constants, notes = None, _notes(replica)
    if setup.mode == "calibrated":
        from headway.plan.estimates import calibrated_step  # brings numpy, which a bound does not need

        constants, reason = calibrated_step(
            replica.shape, replica.hardware, setup.engine, replica.precision, setup.gpus
        )
        notes += [f"abstains, so this is the exact bound: {reason}"] if reason else []
    if chunk and setup.mode == "textbook":
        raise BadInput("--chunk", "textbook mode has no mixed steps; accepted with --mode exact or calibrated")
    whole_from(0, "--chunk", chunk)
    whole_from(0, "--chunk-start", chunk_start)
    beside = prefill_step(replica.shape, chunk, chunk_start, logits=0) if chunk else None
    cost = _step_cost(replica, batch, context, constants, beside)
    seconds = cost.seconds
    if constants:
        answer |= {
            "kind": "estimate", "engine": setup.engine, "p10": seconds * constants.low, "p90": seconds * constants.high
        }  # fmt: skip
    if mbu is not None:
        share("--mbu", mbu)
        apart = cost.terms["all_reduce"] + cost.terms["overhead"]
        seconds, answer["kind"] = (cost.seconds - apart) / mbu + apart, "estimate"
    return answer | {
        "batch": batch, "context": context, "chunk": chunk, "seconds": seconds,
        "tokens_per_second": batch / seconds,
        "tokens_per_second_per_user": 1.0 / seconds, "tokens_per_second_per_gpu": batch / seconds / setup.gpus,
        "binds": cost.binds, "largest_term": cost.largest, "terms": cost.terms,
        "fits": batch <= capacities.memory_batch(replica, context), "notes": notes,
    }  # fmt: skip


def _step_cost(
    replica: Replica,
    batch: int,
    context: int,
    constants: Calibrated | None = None,
    beside: StepShape | None = None,
) -> StepCost:
    whole_from(1, "--batch", batch)
    if constants is None and beside is None:
        return decode(replica, batch, context)
    whole_from(0, "--context", context)
    model = step_time(replica)
    if constants:
        model = StepTime(
            model.shape, model.hardware, model.layout, math=model.math, efficiency=constants.efficiency,
            all_reduce=replica.all_reduce or constants.all_reduce, skew=model.skew,
        )  # fmt: skip
    decodes = decode_step(replica.shape, batch, context)
    cost = model.explain(mixed_step(decodes, beside) if beside else decodes)
    extra = cost.terms["overhead"] + replica.overhead
    return StepCost(cost.seconds + replica.overhead, cost.binds, cost.terms | {"overhead": extra})


def _notes(replica: Replica) -> list[str]:
    notes = []
    if replica.pi == float("inf"):
        notes.append(f"{replica.hardware.name} has no catalogued peak: arithmetic is left out, only memory is modelled")
    if replica.hardware.measured:
        notes.append(f"{replica.hardware.measured:.0%} of this bandwidth was measured on {replica.hardware.name}")
    return notes


def prefill_answer(setup: Setup, input_tokens: int, mfu: float, cached: int = 0) -> dict[str, Any]:
    """Prefill of one prompt (B4): the part of TTFT that is not queueing."""
    replica = setup.replica(BOUNDS)
    cost = prefill(replica, input_tokens, mfu, cached=cached)
    return heading(setup, replica) | {
        "kind": "bound" if mfu == 1 else "estimate", "input_tokens": input_tokens, "cached_tokens": cached, "mfu": mfu,
        "seconds": cost.seconds, "tokens_per_second": (input_tokens - cached) / cost.seconds, "binds": cost.binds,
        "terms": cost.terms,
    }  # fmt: skip


def frontier(setup: Setup, context: int, batches: list[int] | None = None, reserve_gb: float = 0.0) -> dict[str, Any]:
    """Interactivity against throughput (B5)."""
    not_negative("--reserve-gb", reserve_gb)
    replica = setup.replica(BOUNDS)
    curve = trace_frontier(replica, context, batches, reserve_gb * 1e9)
    return heading(setup, replica) | {
        "context": context, "knee": curve.knee, "critical_context": curve.critical_context, "ceiling": curve.ceiling,
        "fits_batch": curve.fits, "points": msgspec.to_builtins(curve.points),
    }  # fmt: skip


def capacity(setup: Setup, context: int, tpot_ms: float | None = None, reserve_gb: float = 0.0) -> dict[str, Any]:
    """How many sequences fit, and what limits them (B6)."""
    not_negative("--reserve-gb", reserve_gb)
    whole_from(1, "--context", context)
    replica = setup.replica(BOUNDS)
    tpot = None if tpot_ms is None else tpot_ms * 1e-3
    found = capacities.capacity(replica, context, tpot, reserve_gb * 1e9)
    answer = heading(setup, replica) | {"context": context, "tpot_ms": tpot_ms} | msgspec.to_builtins(found)
    if found.batch:
        cost = decode(replica, found.batch, context)
        answer |= {"seconds": cost.seconds, "tokens_per_second": found.batch / cost.seconds}
    return answer


def tensor_parallel_answer(setup: Setup, degrees: list[int], batch: int, context: int) -> dict[str, Any]:
    """The decode step at each tensor-parallel degree (B7), ring all-reduces unless another kind is named."""
    if not degrees:
        raise BadInput("--degrees", "accepted: whole numbers, like 1,2,4,8")
    named = setup if setup.all_reduce else msgspec.structs.replace(setup, all_reduce="ring")
    replica = msgspec.structs.replace(named, gpus=1).replica(BOUNDS)
    if setup.mode == "textbook":
        costs = tensor_parallel(replica, degrees, batch, context)
    else:
        costs = {}
        for degree in degrees:
            check_layout(replica.shape, degree, field="--degrees")
            costs[degree] = decode(msgspec.structs.replace(replica, gpus=degree), batch, context)
    best = min(costs, key=lambda degree: costs[degree].seconds)
    latency = setup.link_seconds()
    return heading(setup, replica) | {
        "gpus": None, "batch": batch, "context": context, "all_reduce": named.all_reduce,
        "link_latency_us": latency * 1e6,
        "message_bytes": batch * replica.shape.d_model * ACTIVATION_BYTES,
        "seconds": {str(degree): cost.seconds for degree, cost in costs.items()},
        "best_degree": best,
        "best_degree_continuous": best_degree_continuous(replica, latency) if latency else None,
        "binds": {str(degree): cost.binds for degree, cost in costs.items()},
        "terms": {str(degree): cost.terms for degree, cost in costs.items()},
        "fits": {str(n): replica.weights < n * replica.hardware.memory for n in costs},
    }  # fmt: skip


class Pricing(msgspec.Struct, frozen=True):
    """Options of `cost` beside the set-up."""

    batch: int | None = None
    context: int = 4096
    input_tokens: int = 2000
    price: float | None = None
    mfu: float = 0.5
    cache_hit: float = 0.0
    hit_cost: float = 0.0
    utilisation: float = 1.0
    tpot_ms: float | None = None


def price_of(device: Hardware, given: float | None) -> tuple[float, str]:
    """Dollars per GPU-hour and where the figure is from."""
    if given is not None:
        if not 0 <= given < float("inf"):
            raise BadInput("--price", f"{given}; accepted: dollars per GPU-hour from 0")
        return given, "given"
    if device.price is None:
        raise BadInput("--price", f"no price is catalogued for {device.name}; give dollars per GPU-hour")
    known = device.price
    return known.typical, f"typical of {known.low:g}-{known.high:g} $/GPU-h seen by {known.date}: {known.source}"


def input_note(mfu: float) -> list[str]:
    """What an input price rests on: a bound only where prefill reaches the peak."""
    return [] if mfu == 1 else [f"prices of input are estimates: prefill at an assumed {mfu:.0%} MFU"]


def cost(setup: Setup, pricing: Pricing) -> dict[str, Any]:
    """$/M input and output tokens (B9). Without a batch: the largest that fits (and meets the TPOT target)."""
    replica = setup.replica(BOUNDS)
    price, source = price_of(replica.hardware, pricing.price)
    tpot = None if pricing.tpot_ms is None else pricing.tpot_ms * 1e-3
    found = capacities.capacity(replica, max(pricing.context, 1), tpot)
    batch = found.batch if pricing.batch is None else pricing.batch
    if batch < 1:
        reason = "nothing fits in memory" if found.limited_by == "nothing fits" else f"{found.limited_by} allows none"
        raise BadInput("--batch", f"no batch is possible at this context: {reason}; use more GPUs or fewer bytes")
    found_cost = token_cost(
        replica, batch, pricing.context, price, input_tokens=pricing.input_tokens, mfu=pricing.mfu,
        hit_share=pricing.cache_hit, hit_cost=pricing.hit_cost, utilisation=pricing.utilisation,
    )  # fmt: skip
    cost_of_step = decode(replica, batch, pricing.context)
    return heading(setup, replica) | {
        "batch": batch, "context": pricing.context, "fits": batch <= found.memory_batch, "price_per_gpu_hour": price,
        "price_source": source, "utilisation": pricing.utilisation, "mfu": pricing.mfu,
        "cache_hit": pricing.cache_hit, "seconds": cost_of_step.seconds, "binds": cost_of_step.binds,
        "terms": cost_of_step.terms, "ratio": found_cost.usd_per_million_output / found_cost.usd_per_million_input
        if found_cost.usd_per_million_input else None, "notes": input_note(pricing.mfu),
    } | msgspec.to_builtins(found_cost)  # fmt: skip


def cost_table(setup: Setup, batches: list[int], pricing: Pricing) -> dict[str, Any]:
    """The first text's table (weights only), and which batches' caches do not fit at the context."""
    replica = setup.replica()
    price, source = price_of(replica.hardware, pricing.price)
    if not batches or min(batches) < 1:
        raise BadInput("--batches", "accepted: whole numbers from 1, like 1,8,64,256")
    rows = price_table(replica, batches, pricing.context, price, pricing.mfu)
    free = capacities.free_bytes(replica)
    return heading(setup, replica) | {
        "context": pricing.context, "price_per_gpu_hour": price, "price_source": source, "mfu": pricing.mfu,
        "weights_gb": replica.weights / 1e9, "memory_gb": setup.gpus * replica.hardware.memory / 1e9,
        "free_gb": free / 1e9, "rows": msgspec.to_builtins(rows),
        "notes": input_note(pricing.mfu),
    }  # fmt: skip


def ratio(setup: Setup, batch: int, context: int, mfu: float = 0.5, input_tokens: int | None = None) -> dict[str, Any]:
    """Output over input price (B9). `input_tokens`: length of a prompt, which only exact mode asks for (2000)."""
    whole_from(1, "--batch", batch)
    whole_from(0, "--context", context)
    if input_tokens is not None and setup.mode == "textbook":
        raise BadInput("--input-tokens", "the textbook ratio has no prompt length; accepted with --mode exact")
    prompt = 2000 if input_tokens is None else input_tokens
    whole_from(1, "--input-tokens", prompt)
    replica = setup.replica(BOUNDS)
    if replica.pi == float("inf"):
        raise BadInput("--peak-tflops", f"no peak is catalogued for {replica.hardware.name}; give its TFLOP/s")
    whole = price_ratio(replica, batch, context, mfu, prompt)
    weights = price_ratio(replica, batch, 0, mfu, prompt)
    return heading(setup, replica) | {
        "kind": "bound" if mfu == 1 else "estimate", "batch": batch, "context": context, "mfu": mfu,
        "input_tokens": prompt if replica.exact else None, "ratio": whole, "weights_part": weights,
        "cache_part": whole - weights, "notes": input_note(mfu),
    }  # fmt: skip


def levers(
    setup: Setup, batch: int, input_tokens: int, output_tokens: int, draft: Draft, cache_hit: float
) -> dict[str, Any]:
    """Every lever on this deployment: which term, by how much (B11)."""
    for field, value in (("--batch", batch), ("--input-tokens", input_tokens), ("--output-tokens", output_tokens)):
        whole_from(1, field, value)
    if not 0 <= cache_hit <= 1:
        raise BadInput("--cache-hit", f"{cache_hit}; accepted: from 0 to 1")
    not_negative("--draft-cost", draft.cost)
    if any(not value >= 1 for value in draft.curve):
        raise BadInput("--acceptance-curve", f"{min(draft.curve)}; accepted: tokens per step from 1")
    replica = setup.replica(BOUNDS)
    table = lever_table(replica, batch, input_tokens, output_tokens, draft, cache_hit)
    return heading(setup, replica) | {
        "batch": batch, "input_tokens": input_tokens, "output_tokens": output_tokens,
        "levers": msgspec.to_builtins(table),
    }  # fmt: skip
