"""`headway plan search`: which deployments carry this traffic within these targets, ranked by dollars per hour (B13).

Every device, GPU count, precision and split is put through the same exact step-time model with an engine's calibrated
constants, so all figures here are estimates. Deployments that cannot do it are listed with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

import msgspec

from headway.core.errors import BadInput
from headway.plan.answers import Deployment, Rejected, Search
from headway.plan.estimates import calibrated_step, constants
from headway.plan.flags import engine_flags
from headway.plan.load import Load, OpenLoop
from headway.plan.prices import price_assumption
from headway.plan.traffic import Target, Traffic, check
from headway.report.units import gigabytes, metric
from headway.roofline.hardware import Hardware
from headway.roofline.step import StepTime, can_split
from headway.roofline.work import Layout
from headway.shape.formats import nominal_bytes
from headway.shape.model import ModelShape, store_as

BASIS = (
    "The exact step-time model with constants fitted on public runs of the engine, and queueing. Basis "
    "calibrated: such runs exist on this kind of device (ranges: headway plan estimate); extrapolated: they do not."
)
DEGREES = (1, 2, 4, 8)
NETWORK = 50e9  # bytes/s per GPU that ships caches from a prefill pool to a decode pool: one 400 Gbit/s port


class Wanted(msgspec.Struct, frozen=True):
    """What to search over.

    Attributes:
        hardware: devices. precisions: of the weights; "stored" = as the checkpoint has them. kv: of the cache.
        degrees: GPUs of one replica. split: also consider separate prefill and decode pools.
        budget: most dollars per hour. prices: dollars per GPU-hour by device, in place of the catalogue's.
        most: deployments to list.
        engine: whose calibrated constants to take.
    """

    hardware: tuple[Hardware, ...]
    precisions: tuple[str, ...] = ("stored",)
    kv: str | None = None
    degrees: tuple[int, ...] = DEGREES
    split: bool = True
    budget: float | None = None
    prices: dict[str, float] = {}
    most: int = 10
    engine: str = "vllm"


class Candidate(msgspec.Struct, frozen=True):
    """One way to build a replica. `basis`: where its constants are from."""

    device: Hardware
    gpus: int
    precision: str
    attention_dp: int
    model: StepTime
    basis: str

    @property
    def name(self) -> str:
        parallel = f"TP{self.gpus}" if self.attention_dp == 1 else f"TP{self.gpus} with DP{self.attention_dp} attention"
        return f"{self.gpus} x {self.device.name} {self.precision} {parallel}"


def search(model_name: str, shape: ModelShape, traffic: Traffic, target: Target, wanted: Wanted) -> Search:
    """Ranked deployments (cheapest first), and the rejected ones with reasons."""
    check(traffic, target)
    if wanted.budget is not None and not wanted.budget > 0:
        raise BadInput("--budget", f"{wanted.budget:g}; accepted: dollars per hour above 0")
    if not wanted.degrees or min(wanted.degrees) < 1:
        raise BadInput("--degrees", f"{min(wanted.degrees, default=0)}; accepted: whole numbers from 1")
    if wanted.most < 1:
        raise BadInput("--most", f"{wanted.most}; accepted: a whole number from 1")
    found: list[Deployment] = []
    rejected: list[Rejected] = []
    for candidate in candidates(shape, wanted):
        if isinstance(candidate, Rejected):
            rejected.append(candidate)
            continue
        for row in (_mixed(candidate, traffic, target, wanted), _split(candidate, traffic, target, wanted)):
            if isinstance(row, Deployment):
                found.append(row)
            elif row is not None:
                rejected.append(row)
    # ties on price are common (a split pool of the same size): the quicker first token goes first
    found.sort(key=lambda row: (row.usd_per_hour, row.ttft_ms))
    best = [
        msgspec.structs.replace(row, rank=rank, flags=engine_flags(model_name, shape, row, wanted.kv))
        for rank, row in enumerate(found[: wanted.most], start=1)
    ]
    return Search(
        model=shape.name, basis=BASIS, traffic=traffic, target=target, budget=wanted.budget, deployments=best,
        considered=len(found) + len(rejected), rejected=rejected,
        assumptions=_assumptions(traffic, wanted, {row.hardware for row in best}),
    )  # fmt: skip


def _assumptions(traffic: Traffic, wanted: Wanted, listed: set[str]) -> list[str]:
    """What the ranking rests on: prices first, of the devices listed."""
    lines = []
    for device in wanted.hardware:
        price = price_of(device, wanted)
        if price is not None and device.name in listed:
            line = price_assumption(device, price, price != (device.price and device.price.typical), "--prices")
            lines.append(f"{line}; {gigabytes(device.usable)}")
    burst = "Poisson" if traffic.arrival_cv2 == 1 else f"arrivals with a squared variation of {traffic.arrival_cv2:.2g}"
    lines.append(f"{burst}; lengths at their mean; {traffic.cache_hit:.0%} of input cached (--cache-hit)")
    if wanted.split:
        lines.append(f"a split ships caches over {metric(NETWORK, 'B/s')} per GPU (--no-split leaves splits out)")
    return lines


def candidates(shape: ModelShape, wanted: Wanted) -> Iterator[Candidate | Rejected]:
    """Every replica to try, or why one is left out."""
    cached = shape if wanted.kv is None else shape.with_kv_bytes(nominal_bytes(wanted.kv, "--kv"))
    latent = any(group.kind == "latent" for group in shape.groups)
    for device in wanted.hardware:
        if not device.peaks:
            yield Rejected(device.name, "no peak arithmetic is catalogued: prefill cannot be timed")
            continue
        reachable = device.link.group if device.link else 1
        for precision in wanted.precisions:
            stored = cached if precision == "stored" else store_as(cached, precision)
            label = shape.weight_format if precision == "stored" else precision
            for gpus in wanted.degrees:
                name = f"{gpus} x {device.name} {label}"
                if gpus > reachable:
                    yield Rejected(name, f"links join {reachable} of these devices at most")
                    continue
                if not can_split(stored, gpus):
                    yield Rejected(name, f"{stored.heads} heads cannot be split over {gpus} GPUs")
                    continue
                for attention_dp in sorted({1, gpus}) if latent else (1,):
                    yield _candidate(stored, device, gpus, label, attention_dp, wanted.engine)


def _candidate(
    shape: ModelShape, device: Hardware, gpus: int, precision: str, attention_dp: int, engine: str
) -> Candidate:
    """A replica with the constants of its engine, and their range where it was measured on such a device."""
    layout = Layout(gpus, attention_dp)
    known = constants(shape, device, engine, precision, gpus)
    model = StepTime(shape, device, layout, efficiency=known.efficiency, all_reduce=known.all_reduce)
    measured = not calibrated_step(shape, device, engine, precision, gpus)[1]
    return Candidate(device, gpus, precision, attention_dp, model, "calibrated" if measured else "extrapolated")


def price_of(device: Hardware, wanted: Wanted) -> float | None:
    """Dollars per GPU-hour, the user's figure first."""
    for name, price in wanted.prices.items():
        if name == device.name or name in device.aliases:
            return price
    return device.price.typical if device.price else None


def _mixed(c: Candidate, traffic: Traffic, target: Target, wanted: Wanted) -> Deployment | Rejected:
    """Replicas that prefill and decode in the same steps."""
    replica = OpenLoop(c.model)
    if replica.memory.room <= 0:
        return Rejected(c.name, "the weights do not fit")
    if replica.sequence_bytes(traffic.longest) > replica.memory.room:
        return Rejected(
            c.name, f"the longest request, {traffic.longest} tokens: {_too_large(replica, traffic.longest)}"
        )
    most, limit = replica.most(traffic, target)
    if most <= 0:
        return Rejected(c.name, _why(limit, replica, traffic))
    replicas = ceil(traffic.rate / most)
    load = replica.at(traffic.rate / replicas, traffic, target)
    return _priced(
        c, load, load.ttft, traffic, wanted, load.prefill_share, name=f"{replicas} x ({c.name})", replicas=replicas,
        prefill_replicas=0, goodput=replicas * most, limited_by=limit,
        survives_one_loss=(replicas - 1) * most >= traffic.rate,
    )  # fmt: skip


def _split(c: Candidate, traffic: Traffic, target: Target, wanted: Wanted) -> Deployment | Rejected | None:
    """A pool that prefills and one that decodes, the cache shipped between them; None where it makes no sense."""
    if not wanted.split or c.device.kind == "cpu":
        return None
    prefill, decode = OpenLoop(c.model, "prefill"), OpenLoop(c.model, "decode")
    if prefill.memory.room <= prefill.sequence_bytes(traffic.longest):
        return None  # the mixed row says what does not fit
    ship = prefill.sequence_bytes(traffic.fresh_tokens) / NETWORK  # every GPU ships its own part
    in_time = None if target.ttft is None else target.ttft - ship
    if in_time is not None and in_time <= 0:
        return Rejected(f"split {c.name}", "shipping one cache takes longer than the TTFT target")
    first = msgspec.structs.replace(target, ttft=in_time)
    most_prefill, limit_prefill = prefill.most(traffic, first)
    most_decode, limit_decode = decode.most(traffic, target)
    if most_prefill <= 0 or most_decode <= 0:
        limit = limit_prefill if most_prefill <= 0 else limit_decode
        return Rejected(f"split {c.name}", _why(limit, prefill, traffic))
    prefills, decodes = ceil(traffic.rate / most_prefill), ceil(traffic.rate / most_decode)
    ttft = prefill.at(traffic.rate / prefills, traffic, first).ttft + ship
    load = decode.at(traffic.rate / decodes, traffic, target)
    return _priced(
        c, load, ttft, traffic, wanted, prefills / (prefills + decodes),
        name=f"{prefills} prefill + {decodes} decode x ({c.name})", replicas=decodes, prefill_replicas=prefills,
        goodput=min(prefills * most_prefill, decodes * most_decode),
        limited_by=limit_prefill if prefills * most_prefill < decodes * most_decode else limit_decode,
        survives_one_loss=min((prefills - 1) * most_prefill, (decodes - 1) * most_decode) >= traffic.rate,
    )  # fmt: skip


def _priced(
    c: Candidate, load: Load, ttft: float, traffic: Traffic, wanted: Wanted, prefill_share: float, *, name: str,
    replicas: int, prefill_replicas: int, goodput: float, **rest: Any,
) -> Deployment | Rejected:  # fmt: skip
    """The deployment with its bill, `prefill_share` of which is for prompts; rejected when it cannot be priced or is
    over budget."""
    price, total, loop = price_of(c.device, wanted), (replicas + prefill_replicas) * c.gpus, OpenLoop(c.model)
    if price is None:
        return Rejected(c.name, "no price is catalogued; give one with --prices")
    hour = price * total
    if wanted.budget is not None and hour > wanted.budget:
        return Rejected(c.name, f"{total} GPUs at ${hour:,.2f}/h are over the budget")
    tokens = traffic.rate * 3600 / 1e6  # million requests' worth of one token, per hour
    return Deployment(
        rank=0, name=name, hardware=c.device.name, hardware_kind=c.device.kind, gpus=c.gpus, total_gpus=total,
        precision=c.precision, replicas=replicas, prefill_replicas=prefill_replicas, attention_dp=c.attention_dp,
        memory=loop.memory, max_model_len=_context_limit(loop, traffic),
        batch=round(load.batch, 1), peak_batch=ceil(load.peak_batch), chunk=load.chunk, ttft_ms=ttft * 1e3,
        tpot_ms=load.tpot * 1e3, mean_tpot_ms=load.mean_tpot * 1e3, basis=c.basis,
        goodput=goodput, utilisation=traffic.rate / goodput, headroom=goodput / traffic.rate - 1,
        price_per_gpu_hour=price, usd_per_hour=hour,
        usd_per_million_input=hour * prefill_share / (tokens * traffic.input_tokens),
        usd_per_million_output=hour * (1 - prefill_share) / (tokens * traffic.output_tokens), **rest,
    )  # fmt: skip


def _context_limit(replica: OpenLoop, traffic: Traffic) -> int:
    """Context limit to set: what the traffic needs, rounded up to 1024 while the memory holds it, never above the
    model's own."""
    shape = replica.model.shape
    need = traffic.longest or ceil(traffic.input_tokens + traffic.output_tokens)
    limit = ceil((traffic.longest or 2 * need) / 1024) * 1024
    while limit > need and replica.sequence_bytes(limit) > replica.memory.room:
        limit = max(need, limit - 1024)
    return min(limit, shape.context) if shape.context else limit


def _too_large(replica: OpenLoop, tokens: float) -> str:
    need, free = replica.sequence_bytes(tokens) / 1e9, replica.memory.room / 1e9
    return f"its cache takes {need:.1f} GB of the {free:.1f} GB left per GPU"


def _why(limit: str, replica: OpenLoop, traffic: Traffic) -> str:
    """Why not even a trickle of requests is served."""
    if limit == "memory":
        return f"one request alone: {_too_large(replica, traffic.mean_context)}, peaks counted"
    return {
        "tpot": "one request alone is slower than the TPOT target",
        "ttft": "one prompt alone takes longer than the TTFT target",
    }.get(limit, "saturated by one request")
