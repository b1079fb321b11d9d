"""How long a step takes and what fits: `headway plan step`, `prefill`, `frontier`, `capacity`, `tp`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from headway.core.errors import BadInput
from headway.core.step import StepShape
from headway.plan.answers import Capacity, Frontier, Prefill, Step, TensorParallel
from headway.plan.setup import BOUNDS, MODES, Setup, gpus_needed, whole_from
from headway.roofline import capacity as capacities
from headway.roofline import frontier as frontiers
from headway.roofline import replica as replicas
from headway.roofline.replica import Replica, decode, not_negative, share
from headway.roofline.step import StepCost, mixed_step, prefill_step
from headway.roofline.timing import Timing
from headway.roofline.work import message_bytes

if TYPE_CHECKING:
    from headway.plan.estimates import Calibrated

USUAL_MFU = 0.5  # of prefill, where nobody says and nothing is measured


def step(
    setup: Setup, batch: int = 1, context: int = 4096, mbu: float | None = None, chunk: int = 0, chunk_start: int = 0
) -> Step:
    """One decode step (B3), in exact modes also with `chunk` tokens of a prompt in it, of which `chunk_start` are
    computed already. With `mbu` the bound's roof is divided by it and the answer is an estimate."""
    replica = setup.replica(MODES)
    constants = None
    notes: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    here = setup.measured(replica)
    if here is not None:
        notes = _doubt(here)
    elif setup.mode == "calibrated":
        from headway.plan.estimates import calibrated_step  # brings numpy, which a bound does not need

        constants, reason = calibrated_step(
            replica.shape, replica.hardware, setup.engine, replica.precision, replica.layout
        )
        notes = (f"abstains, so this is the exact bound: {reason}",) if reason else ()
    timing = here if here is not None and here.label == "estimate" else None
    if chunk and setup.counting == "textbook" and not timing:
        raise BadInput("--chunk", "textbook mode has no mixed steps; accepted with --mode exact or calibrated")
    whole_from(0, "--chunk", chunk)
    whole_from(0, "--chunk-start", chunk_start)
    beside = prefill_step(replica.shape, chunk, chunk_start, logits=0) if chunk else None
    cost = _step_cost(replica, batch, context, constants, beside, timing)
    seconds = cost.seconds
    if mbu is not None:
        share("--mbu", mbu)
        apart = cost.terms["all_reduce"] + cost.terms["overhead"]
        seconds = (cost.seconds - apart) / mbu + apart
        assumptions = (f"reading and arithmetic reach {mbu:.0%} of their peaks (--mbu)",)
    fits = batch <= capacities.memory_batch(replica, context)
    return Step(
        **_about(setup, replica, timing, notes, assumptions, context)
        | {"kind": "estimate" if constants or timing or mbu else "bound"},
        batch=batch, context=context, chunk=chunk, seconds=seconds,
        tokens_per_second=batch / seconds, tokens_per_second_per_user=1.0 / seconds,
        tokens_per_second_per_gpu=batch / seconds / setup.gpus, binds=cost.binds, largest_term=cost.largest,
        terms=cost.terms, fits=fits, gpus_needed=None if fits else gpus_needed(replica, context, batch),
        range=timing.range(seconds) if timing else None,
    )  # fmt: skip


def _about(
    setup: Setup, replica: Replica, timing: Timing | None, notes: tuple[str, ...], assumptions: tuple[str, ...],
    longest: float,
) -> dict[str, Any]:  # fmt: skip
    """What the answer rests on, `timing` where that are steps of this machine."""
    if timing is not None:
        setup = msgspec.structs.replace(setup, mode="calibrated")
        return setup.about(replica, notes, assumptions, "measured", longest)
    bound = "exact" if setup.mode == "calibrated" and notes else ""
    return setup.about(replica, notes, assumptions, bound, longest)


def _doubt(timing: Timing) -> tuple[str, ...]:
    """Why a measured machine has a bound only."""
    return (f"abstains, so this is a bound: {timing.reason}",) if timing.label == "bound" else ()


def _step_cost(
    replica: Replica,
    batch: int,
    context: int,
    constants: Calibrated | None = None,
    beside: StepShape | None = None,
    timing: Timing | None = None,
) -> StepCost:
    whole_from(1, "--batch", batch)
    whole_from(0, "--context", context)
    if timing is not None:
        model = timing.model
    else:
        model = replica.step_time(constants.efficiency, constants.all_reduce) if constants else replica.step_time()
    decodes = replica.decodes(batch, context)
    return model.explain(mixed_step(decodes, beside) if beside else decodes)


def prefill(setup: Setup, input_tokens: int = 2000, cached_tokens: int = 0, mfu: float | None = None) -> Prefill:
    """Prefill of one prompt (B4): the part of TTFT that is not queueing. `mfu`: assumed; None = 50 %, and on a measured
    machine what was measured."""
    replica = setup.replica(BOUNDS)
    here = setup.measured(replica) if mfu is None else None
    notes = _doubt(here) if here is not None else ()
    if here is not None and here.label == "estimate":
        replicas.check_prompt(input_tokens, cached_tokens)
        cost = here.model.explain(prefill_step(replica.shape, input_tokens - cached_tokens, cached_tokens))
        about = _about(setup, replica, here, notes, (), input_tokens) | {"kind": "estimate"}
    else:
        setup.needs_peak(replica)
        here, mfu = None, USUAL_MFU if mfu is None else mfu
        cost = replicas.prefill(replica, input_tokens, mfu, cached=cached_tokens)
        about = _about(setup, replica, None, notes, mfu_assumption(mfu), input_tokens) | {"kind": kind_of(mfu)}
    long = replicas.attention_overtakes(replica.shape)
    return Prefill(
        **about, input_tokens=input_tokens, cached_tokens=cached_tokens, mfu=mfu, seconds=cost.seconds,
        tokens_per_second=replica.prompts_at_once * (input_tokens - cached_tokens) / cost.seconds,
        binds=cost.binds, terms=cost.terms,
        attention_overtakes=long if long < math.inf else None, range=here.range(cost.seconds) if here else None,
    )  # fmt: skip


def kind_of(mfu: float) -> str:
    """What an answer about prompts is: a bound only where prefill reaches the peak."""
    return "bound" if mfu == 1 else "estimate"


def mfu_assumption(mfu: float) -> tuple[str, ...]:
    return () if mfu == 1 else (f"prefill reaches {mfu:.0%} of the arithmetic's peak (--mfu)",)


def frontier(setup: Setup, context: int = 4096, batches: Sequence[int] = (), reserve_gb: float = 0.0) -> Frontier:
    """Interactivity against throughput (B5), by default over a ladder of batches."""
    not_negative("--reserve-gb", reserve_gb)
    replica = setup.replica(BOUNDS)
    curve = frontiers.frontier(replica, context, batches or None, reserve_gb * 1e9)
    return Frontier(
        **setup.about(replica, longest=context), context=context,
        knee=curve.knee, critical_context=curve.critical_context,
        ceiling=curve.ceiling, fits_batch=curve.fits, points=curve.points,
        **_served(setup, replica, [point.batch for point in curve.points if point.fits], context),
    )  # fmt: skip


def _served(setup: Setup, replica: Replica, loads: Sequence[float], context: int) -> dict[str, Any]:
    """Estimates at these loads, or why there are none."""
    from headway.plan import forecast  # brings numpy, which a bound does not need

    found = forecast.forecasts(setup, replica, loads, *forecast.lengths(context))
    return {"served": found.points, "abstained": found.abstained}


def _served_within(setup: Setup, replica: Replica, batch: int, context: int, tpot: float | None) -> dict[str, Any]:
    """The most in flight that an engine holds, and serves within the promise: in the middle, and at p90."""
    ladder = frontiers.default_batches(max(1, batch))
    found = _served(setup, replica, ladder if tpot is not None else [batch], context)
    points = found.pop("served")
    kept = [one for one in points if tpot is None or one.tpot.p50 <= tpot]
    sure = [one for one in points if tpot is not None and one.tpot.p90 <= tpot]
    return found | {"served": kept[-1] if kept else None, "surely": sure[-1] if sure else None}


def capacity(setup: Setup, context: int = 4096, tpot_ms: float | None = None, reserve_gb: float = 0.0) -> Capacity:
    """How many sequences fit, and what limits them (B6)."""
    not_negative("--reserve-gb", reserve_gb)
    whole_from(1, "--context", context)
    replica, reserve = setup.replica(BOUNDS), reserve_gb * 1e9
    found = capacities.capacity(replica, context, None if tpot_ms is None else tpot_ms * 1e-3, reserve)
    seconds = decode(replica, found.batch, context).seconds if found.batch else None
    return Capacity(
        **setup.about(
            replica, assumptions=(f"{reserve_gb:g} GB kept for activations (--reserve-gb)",), longest=context
        )
        | {"memory": capacities.memory_plan(replica, reserve)},
        context=context, tpot_ms=tpot_ms, **msgspec.structs.asdict(found),
        gpus_needed=None if found.memory_batch else gpus_needed(replica, context, 1, reserve),
        seconds=seconds, tokens_per_second=found.batch / seconds if seconds else None,
        **_served_within(setup, replica, found.batch, context, None if tpot_ms is None else tpot_ms * 1e-3),
    )  # fmt: skip


def tensor_parallel(
    setup: Setup, degrees: Sequence[int] = (1, 2, 4, 8), batch: int = 1, context: int = 0
) -> TensorParallel:
    """The decode step at each tensor-parallel degree (B7), ring all-reduces unless another kind is named."""
    if not degrees:
        raise BadInput("--degrees", "accepted: whole numbers, like 1,2,4,8")
    named = setup if setup.all_reduce else msgspec.structs.replace(setup, all_reduce="ring")
    replica = msgspec.structs.replace(named, gpus=1).replica(BOUNDS)
    costs = replicas.tensor_parallel(replica, degrees, batch, context)
    latency = setup.link_seconds()
    widest = msgspec.structs.replace(replica, gpus=max(degrees))
    bare = () if context else ("sequences without a cache, as the text counts (--context)",)
    return TensorParallel(
        **named.about(widest, assumptions=bare, longest=context) | {"gpus": None},
        batch=batch, context=context, all_reduce=named.all_reduce,
        link_latency_us=latency * 1e6, message_bytes=message_bytes(replica.shape, batch),
        seconds={degree: cost.seconds for degree, cost in costs.items()},
        best_degree=min(costs, key=lambda degree: costs[degree].seconds),
        best_degree_continuous=replicas.best_degree_continuous(replica, latency) if latency else None,
        binds={degree: cost.binds for degree, cost in costs.items()},
        terms={degree: cost.terms for degree, cost in costs.items()},
        fits={n: replica.weights < n * replica.hardware.usable for n in costs},
    )  # fmt: skip
