"""`headway plan search`: which deployments carry this traffic within these targets, ranked by dollars per hour (B13).

Every device, GPU count, precision and split is put through the closed loop that `estimate` prints, with an engine's
calibrated constants, so all figures here are estimates. Deployments that cannot do it are listed with the reason.
"""

from __future__ import annotations

from math import ceil, inf
from typing import Any

import msgspec

from headway.core.errors import BadInput
from headway.plan.answers_lists import Offer, Rejected, Search
from headway.plan.estimates import calibrated_step, served
from headway.plan.flags import engine_flags
from headway.plan.load import Curve, ReplicaLoad, curves, measured_curve, most
from headway.plan.quotes import GIVEN, Quote
from headway.plan.traffic import Target, Traffic, check
from headway.report.units import gigabytes, metric
from headway.roofline.deployment import Deployment, Pool
from headway.roofline.hardware import BASES, NETWORK, Hardware
from headway.roofline.profile import Profile
from headway.roofline.replica import Replica, deploy
from headway.roofline.step import can_split
from headway.roofline.timing import served_here
from headway.shape.formats import find_format
from headway.shape.model import ModelShape

BASIS = (
    "The closed loop of `plan estimate`, fitted on public runs of the engine, at the traffic's load. Basis "
    "calibrated: such runs exist on this kind of device (ranges: headway plan estimate); extrapolated: they do not; "
    "measured: our own engine's steps on this machine."
)
DEGREES = (1, 2, 4, 8)


class Wanted(msgspec.Struct, frozen=True):
    """What to search over.

    Attributes:
        hardware: devices. precisions: of the weights; "stored" = as the checkpoint has them. kv: of the cache.
        degrees: GPUs of one replica. split: also consider separate prefill and decode pools.
        budget: most dollars per hour. prices: dollars per GPU-hour by device, in place of the catalogue's.
        basis: of the catalogue's prices, one for the whole ranking.
        most: deployments to list.
        engine: whose calibrated constants to take.
        profile: of the measured machine among the hardware, by whose own steps it is judged.
    """

    hardware: tuple[Hardware, ...]
    precisions: tuple[str, ...] = ("stored",)
    kv: str | None = None
    degrees: tuple[int, ...] = DEGREES
    split: bool = True
    budget: float | None = None
    prices: dict[str, float] = {}
    basis: str = BASES[0]
    most: int = 10
    engine: str = "vllm"
    profile: Profile | None = None


class Candidate(msgspec.Struct, frozen=True):
    """One way to build a replica, which computes its own prompts, and the same as one of a pool that only decodes.
    `basis`: where its constants are from."""

    device: Hardware
    precision: str
    mixed: Curve
    decode: Curve
    basis: str

    @property
    def deployment(self) -> Deployment:
        return self.mixed.deployment

    @property
    def name(self) -> str:
        gpus, ranks = self.deployment.gpus, self.deployment.attention_dp
        parallel = f"TP{gpus}" if ranks == 1 else f"TP{gpus} with DP{ranks} attention"
        return f"{gpus} x {self.device.name} {self.precision} {parallel}"


def search(model_name: str, shape: ModelShape, traffic: Traffic, target: Target, wanted: Wanted) -> Search:
    """Ranked deployments (cheapest first), and the rejected ones with reasons."""
    check(traffic, target)
    if wanted.budget is not None and not wanted.budget > 0:
        raise BadInput("--budget", f"{wanted.budget:g}; accepted: dollars per hour above 0")
    if not wanted.degrees or min(wanted.degrees) < 1:
        raise BadInput("--degrees", f"{min(wanted.degrees, default=0)}; accepted: whole numbers from 1")
    if wanted.most < 1:
        raise BadInput("--most", f"{wanted.most}; accepted: a whole number from 1")
    found: list[Offer] = []
    tried, rejected = candidates(shape, traffic, wanted)
    for candidate in tried:
        for row in (_mixed(candidate, traffic, target, wanted), _split(candidate, traffic, target, wanted)):
            if isinstance(row, Offer):
                found.append(row)
            elif row is not None:
                rejected.append(row)
    # ties on price are common (a split pool of the same size): the quicker first token goes first
    found.sort(key=lambda row: (row.usd_per_hour, row.ttft_ms))
    best = [
        msgspec.structs.replace(row, rank=rank, flags=engine_flags(model_name, shape, row, wanted.kv, wanted.engine))
        for rank, row in enumerate(found[: wanted.most], start=1)
    ]
    return Search(
        model=shape.name, basis=BASIS, price_basis=wanted.basis, traffic=traffic, target=target,
        budget=wanted.budget, deployments=best,
        considered=len(found) + len(rejected), rejected=rejected,
        assumptions=_assumptions(traffic, wanted, {row.hardware for row in best}),
    )  # fmt: skip


def _assumptions(traffic: Traffic, wanted: Wanted, listed: set[str]) -> list[str]:
    """What the ranking rests on: prices first, of the devices listed."""
    lines = []
    for device in wanted.hardware:
        price = price_of(device, wanted)
        if price is not None and device.name in listed:
            lines.append(f"{price.line('--prices, --price-basis')}; {gigabytes(device.usable)}")
    burst = "Poisson" if traffic.arrival_cv2 == 1 else f"arrivals with a squared variation of {traffic.arrival_cv2:.2g}"
    lines.append(f"{burst}; lengths at their mean; {traffic.cache_hit:.0%} of input cached (--cache-hit)")
    if wanted.split:
        lines.append(f"a split ships caches over {metric(NETWORK, 'B/s')} per GPU (--no-split leaves splits out)")
    return lines


def candidates(shape: ModelShape, traffic: Traffic, wanted: Wanted) -> tuple[list[Candidate], list[Rejected]]:
    """Every replica to try, and why others are left out."""
    tried: list[tuple[Hardware, str, Deployment]] = []
    rejected: list[Rejected] = []
    latent = any(group.kind == "latent" for group in shape.groups)
    for device in wanted.hardware:
        if not device.peaks:
            rejected.append(Rejected(device.name, "no peak arithmetic is catalogued: prefill cannot be timed"))
            continue
        reachable = device.link.group if device.link else 1
        for precision in wanted.precisions:
            label = shape.weight_format if precision == "stored" else precision
            find_format(label)
            for gpus in wanted.degrees:
                name = f"{gpus} x {device.name} {label}"
                if gpus > reachable:
                    rejected.append(Rejected(name, f"links join {reachable} of these devices at most"))
                    continue
                if not can_split(shape, gpus):
                    rejected.append(Rejected(name, f"{shape.heads} heads cannot be split over {gpus} GPUs"))
                    continue
                base = served(
                    shape, device, wanted.engine, label, gpus, 1, traffic.input_tokens, traffic.output_tokens, wanted.kv
                )
                base = msgspec.structs.replace(base, cached=traffic.input_tokens - traffic.fresh_tokens)
                tried += [
                    (device, label, msgspec.structs.replace(base, attention_dp=ranks))
                    for ranks in (sorted({1, gpus}) if latent else (1,))
                ]
    alone = [
        msgspec.structs.replace(d, prefill=Pool(d.gpus, d.attention_dp, d.expert_parallel, inf)) for _, _, d in tried
    ]
    loaded = curves([*(d for _, _, d in tried), *alone])
    found = [
        Candidate(device, label, mixed, decode, _basis(mixed.deployment))
        for (device, label, _), mixed, decode in zip(tried, loaded[: len(tried)], loaded[len(tried) :], strict=True)
    ]
    return [_as_measured(one, wanted) for one in found], rejected


def _as_measured(c: Candidate, wanted: Wanted) -> Candidate:
    """By its own steps, where the device is the measured machine and such steps were timed."""
    if wanted.profile is None or c.device.name != wanted.profile.name:
        return c
    d = c.deployment
    replica = deploy(d.shape, c.device, d.gpus, precision=d.precision, mode=Replica)
    timing = served_here(replica.shape, wanted.profile, replica.step_time())
    if timing.label == "bound":
        return c
    curve = measured_curve(timing, d)
    return msgspec.structs.replace(c, mixed=curve, decode=curve, basis="measured")


def _basis(deployment: Deployment) -> str:
    """Was the engine measured on such a device?"""
    reason = calibrated_step(
        deployment.shape, deployment.hardware, deployment.engine, deployment.precision, deployment.layout
    )[1]
    return "extrapolated" if reason else "calibrated"


def price_of(device: Hardware, wanted: Wanted) -> Quote | None:
    """Per GPU-hour, the user's figure first, else on the one basis of this ranking."""
    for name, price in wanted.prices.items():
        if name == device.name or name in device.aliases:
            return Quote(device, price, GIVEN, GIVEN)
    known = device.price.get(wanted.basis)
    return Quote(device, known.typical, wanted.basis, known.source) if known else None


def _mixed(c: Candidate, traffic: Traffic, target: Target, wanted: Wanted) -> Offer | Rejected:
    """Replicas that prefill and decode in the same steps."""
    d = c.deployment
    if d.memory.room <= 0:
        return Rejected(c.name, "the weights do not fit")
    if d.cache(traffic.longest) > d.memory.room:
        return Rejected(c.name, f"the longest request, {traffic.longest} tokens: {_too_large(d, traffic.longest)}")

    def at(rate: float) -> ReplicaLoad:
        return c.mixed.at(rate, traffic, target)

    highest, limit = most(at)
    if highest <= 0:
        return Rejected(c.name, _why(limit, d, traffic))
    count = ceil(traffic.rate / highest)
    load = at(traffic.rate / count)
    return _priced(
        c, load, at(highest), load.ttft, traffic, wanted, load.prefill_share, name=f"{count} x ({c.name})",
        replicas=count, prefill_replicas=0, goodput=count * highest, limited_by=limit,
        survives_one_loss=(count - 1) * highest >= traffic.rate,
    )  # fmt: skip


def _split(c: Candidate, traffic: Traffic, target: Target, wanted: Wanted) -> Offer | Rejected | None:
    """A pool that prefills and one that decodes, the cache shipped between them; None where it makes no sense."""
    d = c.deployment
    if not wanted.split or c.device.kind == "cpu" or d.memory.room <= d.cache(traffic.longest):
        return None  # the mixed row says what does not fit
    ship = d.cache(traffic.fresh_tokens) / NETWORK  # every GPU ships its own part
    in_time = None if target.ttft is None else target.ttft - ship
    if in_time is not None and in_time <= 0:
        return Rejected(f"split {c.name}", "shipping one cache takes longer than the TTFT target")
    first = msgspec.structs.replace(target, ttft=in_time)

    def prefilling(rate: float) -> ReplicaLoad:
        return c.decode.prefilling(rate, traffic, first)

    def decoding(rate: float) -> ReplicaLoad:
        return c.decode.at(rate, traffic, target)

    (fast, limit_prefill), (long, limit_decode) = most(prefilling), most(decoding)
    if fast <= 0 or long <= 0:
        return Rejected(f"split {c.name}", _why(limit_prefill if fast <= 0 else limit_decode, d, traffic))
    prefills, decodes = ceil(traffic.rate / fast), ceil(traffic.rate / long)
    return _priced(
        c, decoding(traffic.rate / decodes), decoding(long), prefilling(traffic.rate / prefills).ttft + ship, traffic,
        wanted, prefills / (prefills + decodes),
        name=f"{prefills} prefill + {decodes} decode x ({c.name})", replicas=decodes, prefill_replicas=prefills,
        goodput=min(prefills * fast, decodes * long),
        limited_by=limit_prefill if prefills * fast < decodes * long else limit_decode,
        survives_one_loss=min((prefills - 1) * fast, (decodes - 1) * long) >= traffic.rate,
    )  # fmt: skip


def _priced(
    c: Candidate, load: ReplicaLoad, full: ReplicaLoad, ttft: float, traffic: Traffic, wanted: Wanted,
    prefill_share: float, *, name: str, replicas: int, prefill_replicas: int, goodput: float, **rest: Any,
) -> Offer | Rejected:  # fmt: skip
    """The deployment with its bill, `prefill_share` of which is for prompts; rejected when it cannot be priced or is
    over budget. `full`: a replica at its goodput, for which engines are set up."""
    d, quote = c.deployment, price_of(c.device, wanted)
    total = (replicas + prefill_replicas) * d.gpus
    if quote is None:
        others = ", ".join(c.device.price)
        there = f"no {wanted.basis} price is known (--price-basis: {others})" if others else "no price is catalogued"
        return Rejected(c.name, f"{there}; give one with --prices")
    price = quote.usd
    hour = price * total
    if wanted.budget is not None and hour > wanted.budget:
        return Rejected(c.name, f"{total} GPUs at ${hour:,.2f}/h are over the budget")
    tokens = traffic.rate * 3600 / 1e6  # million requests' worth of one token, per hour
    return Offer(
        rank=0, name=name, hardware=c.device.name, hardware_kind=c.device.kind, gpus=d.gpus, total_gpus=total,
        precision=c.precision, replicas=replicas, prefill_replicas=prefill_replicas, attention_dp=d.attention_dp,
        memory=d.memory, max_model_len=_context_limit(d, traffic),
        batch=round(load.batch, 1), peak_batch=ceil(load.peak_batch), rows=max(1, ceil(full.peak_batch)),
        chunk=min(load.chunk, full.chunk), ttft_ms=ttft * 1e3,
        tpot_ms=load.tpot * 1e3, mean_tpot_ms=load.mean_tpot * 1e3, basis=c.basis,
        goodput=goodput, utilisation=traffic.rate / goodput, headroom=goodput / traffic.rate - 1,
        price_per_gpu_hour=price, price_basis=quote.basis, usd_per_hour=hour,
        usd_per_million_input=hour * prefill_share / (tokens * traffic.input_tokens),
        usd_per_million_output=hour * (1 - prefill_share) / (tokens * traffic.output_tokens), **rest,
    )  # fmt: skip


def _context_limit(d: Deployment, traffic: Traffic) -> int:
    """Context limit to set: what the traffic needs, rounded up to 1024 while the memory holds it, never above the
    model's own."""
    need = traffic.longest or ceil(traffic.input_tokens + traffic.output_tokens)
    limit = ceil((traffic.longest or 2 * need) / 1024) * 1024
    while limit > need and d.cache(limit) > d.memory.room:
        limit = max(need, limit - 1024)
    return min(limit, d.shape.context) if d.shape.context else limit


def _too_large(d: Deployment, tokens: float) -> str:
    need, free = d.cache(tokens) / 1e9, d.memory.room / 1e9
    return f"its cache takes {need:.1f} GB of the {free:.1f} GB left per GPU"


def _why(limit: str, d: Deployment, traffic: Traffic) -> str:
    """Why not even a trickle of requests is served."""
    if limit == "memory":
        return f"one request alone: {_too_large(d, traffic.mean_context)}, peaks counted"
    return {
        "tpot": "one request alone is slower than the TPOT target",
        "ttft": "one prompt alone takes longer than the TTFT target",
    }.get(limit, "saturated by one request")
