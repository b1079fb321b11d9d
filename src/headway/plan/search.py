"""`headway plan search`: which deployments carry this traffic within these targets, ranked by dollars per hour (B13).

Every device, GPU count, precision and split is put through the closed loop that `estimate` prints, with an engine's
calibrated constants, so all figures here are estimates. Deployments that cannot do it are listed with the reason.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import msgspec

from headway.core.errors import BadInput
from headway.plan.answers_lists import Offer, Rejected, Search, Workers
from headway.plan.candidates import Candidate, Wanted, candidates, price_of
from headway.plan.finalists import Entry, Plays, finals, looser, promoted
from headway.plan.flags import engine_flags
from headway.plan.load import ReplicaLoad, most
from headway.plan.pools import PrefillPool, before_shipping, pools_for, prefill_pools, shipping
from headway.plan.traffic import Target, Traffic, check
from headway.report.units import gigabytes, metric
from headway.roofline.deployment import Deployment
from headway.roofline.hardware import NETWORK
from headway.shape.model import ModelShape

__all__ = ["Wanted", "search"]

IDLE = 0.2  # of a device's label watts, drawn while it waits: assumed
BASIS = (
    "The closed loop of `plan estimate`, fitted on public runs of the engine, at the traffic's load. Basis "
    "calibrated: such runs exist on this kind of device (ranges: headway plan estimate); extrapolated: they do not; "
    "measured: our own engine's steps on this machine."
)


def search(
    model_name: str, shape: ModelShape, traffic: Traffic, target: Target, wanted: Wanted, stage: Plays | None = None
) -> Search:
    """Ranked deployments (cheapest first), and the rejected ones with reasons. `stage`: who plays the first of them,
    which lose their place if they then miss the targets; None = nobody."""
    check(traffic, target)
    if wanted.budget is not None and not wanted.budget > 0:
        raise BadInput("--budget", f"{wanted.budget:g}; accepted: dollars per hour above 0")
    if not wanted.degrees or min(wanted.degrees) < 1:
        raise BadInput("--degrees", f"{min(wanted.degrees, default=0)}; accepted: whole numbers from 1")
    if wanted.most < 1:
        raise BadInput("--most", f"{wanted.most}; accepted: a whole number from 1")
    found: list[Entry] = []
    near: list[Entry] = []
    tried, rejected = candidates(shape, traffic, wanted)
    decoding = [c for c in tried if any(c.device is one for one in wanted.hardware)]
    pools = prefill_pools(tried, traffic, target, wanted) if wanted.split else []
    for candidate in decoding:
        mixed = _mixed(candidate, traffic, target, wanted)
        near += _nearly(candidate, mixed, traffic, target, wanted) if stage else []
        splits = (_split(candidate, pool, traffic, target, wanted) for pool in pools_for(candidate, pools, wanted))
        for row in (mixed, *splits):
            if isinstance(row, Offer):
                found.append(Entry(row, candidate))
            elif row is not None:
                rejected.append(row)
    considered = len(found) + len(rejected)
    found.sort(key=lambda one: _order(one.row))
    played = finals(found, near, stage, traffic, target) if stage else []
    lost = {one.deployment.name for one in played if not one.placed and not one.near}
    rejected += [Rejected(one.deployment.name, one.reason) for one in played if one.deployment.name in lost]
    rows = [one.row for one in found if one.row.name not in lost]
    rows += [promoted(one.deployment) for one in played if one.near and one.placed]
    rows.sort(key=_order)
    best = [
        msgspec.structs.replace(row, rank=rank, flags=engine_flags(model_name, shape, row, wanted.kv, wanted.engine))
        for rank, row in enumerate(rows[: wanted.most], start=1)
    ]
    return Search(
        model=shape.name, basis=BASIS, price_basis=wanted.basis, traffic=traffic, target=target,
        budget=wanted.budget, deployments=best,
        considered=considered, rejected=rejected, finalists=tuple(played),
        assumptions=_assumptions(traffic, wanted, {row.hardware for row in best}),
    )  # fmt: skip


def _order(row: Offer) -> tuple[float, float]:
    """Ties on price are common (a split pool of the same size): the quicker first token goes first."""
    return row.usd_per_hour, row.ttft_ms


def _nearly(c: Candidate, mixed: Offer | Rejected, traffic: Traffic, target: Target, wanted: Wanted) -> list[Entry]:
    """The same with fewer replicas, if it is then predicted to miss a target by a little."""
    loose = _mixed(c, traffic, looser(target), wanted)
    cheaper = isinstance(loose, Offer) and not (isinstance(mixed, Offer) and loose.replicas >= mixed.replicas)
    return [Entry(loose, c, near=True)] if isinstance(loose, Offer) and cheaper else []


def _assumptions(traffic: Traffic, wanted: Wanted, listed: set[str]) -> list[str]:
    """What the ranking rests on: prices first, of the devices listed."""
    lines = []
    for device in wanted.hardware:
        price = price_of(device, wanted)
        if price is not None and device.name in listed:
            lines.append(f"{price.line('--prices, --price-basis')}; {gigabytes(device.usable)}")
    burst = "Poisson" if traffic.arrival_cv2 == 1 else f"arrivals with a squared variation of {traffic.arrival_cv2:.2g}"
    lines.append(f"{burst}; lengths at their mean; {traffic.cache_hit:.0%} of input cached (--cache-hit)")
    lines.append(f"power: the devices' label watts while busy, {IDLE:.0%} of them while idle")
    if wanted.split:
        lines.append(f"a split ships caches over {metric(NETWORK, 'B/s')} per GPU (--no-split leaves splits out)")
    return lines


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
    traffic = traffic.settled(lambda rate: c.mixed.response(rate / ceil(rate / highest), target))
    count = ceil(traffic.rate / highest)
    load = at(traffic.rate / count)
    return _priced(
        c, load, at(highest), load.ttft, traffic, wanted, load.prefill_share, name=f"{count} x ({c.name})",
        replicas=count, prefill_replicas=0, goodput=count * highest, limited_by=limit,
        survives_one_loss=(count - 1) * highest >= traffic.rate,
    )  # fmt: skip


def _split(
    c: Candidate, pool: PrefillPool, traffic: Traffic, target: Target, wanted: Wanted
) -> Offer | Rejected | None:
    """A pool that prefills and one that decodes, the cache shipped between them; None where it makes no sense."""
    d, first = c.deployment, pool.candidate
    if c.device.kind == "cpu" or d.memory.room <= d.cache(traffic.longest):
        return None  # the mixed row says what does not fit

    def decoding(rate: float) -> ReplicaLoad:
        return c.decode.at(rate, traffic, target)

    if pool.limit == "shipping":
        return Rejected(f"split {c.name}", "shipping one cache takes longer than the TTFT target")
    long, limit_decode = most(decoding)
    if not pool.workers or long <= 0:
        limit = limit_decode if pool.workers else pool.limit
        return Rejected(f"split {c.name}", _why(limit, d, traffic))
    fast, before = pool.each, before_shipping(first.deployment, traffic, target) or target

    def response(rate: float) -> float:
        prompt = first.decode.prefilling(rate / ceil(rate / fast), traffic, before).ttft
        return prompt + c.decode.response(rate / ceil(rate / long), target)

    traffic = traffic.settled(response)
    pool = pool.carrying(traffic.rate)
    prefills, decodes = pool.workers, ceil(traffic.rate / long)
    ttft = first.decode.prefilling(traffic.rate / prefills, traffic, before).ttft
    like = first is c
    named = f"{prefills} prefill + {decodes} decode x ({c.name})"
    return _priced(
        c, decoding(traffic.rate / decodes), decoding(long), ttft + shipping(first.deployment, traffic), traffic,
        wanted, None, pool=pool,
        name=named if like else f"{prefills} prefill x ({first.name}) + {decodes} decode x ({c.name})",
        replicas=decodes, prefill_replicas=prefills, goodput=min(prefills * fast, decodes * long),
        limited_by=pool.limit if prefills * fast < decodes * long else limit_decode,
        survives_one_loss=min((prefills - 1) * fast, (decodes - 1) * long) >= traffic.rate,
    )  # fmt: skip


def _priced(
    c: Candidate, load: ReplicaLoad, full: ReplicaLoad, ttft: float, traffic: Traffic, wanted: Wanted,
    prefill_share: float | None, *, name: str, replicas: int, prefill_replicas: int, goodput: float,
    pool: PrefillPool | None = None, **rest: Any,
) -> Offer | Rejected:  # fmt: skip
    """The deployment with its bill, `prefill_share` of which is for prompts (None: the pool's part); rejected when it
    cannot be priced or is over budget. `full`: a replica at its goodput, for which engines are set up."""
    d, quote = c.deployment, price_of(c.device, wanted)
    workers = pool.candidate.deployment if pool else None
    total = replicas * d.gpus + (prefill_replicas * workers.gpus if workers else 0)
    if quote is None:
        others = ", ".join(c.device.price)
        there = f"no {wanted.basis} price is known (--price-basis: {others})" if others else "no price is catalogued"
        return Rejected(c.name, f"{there}; give one with --prices")
    price = quote.usd
    hour = price * replicas * d.gpus + (pool.usd_per_hour if pool else 0.0)
    share = prefill_share if prefill_share is not None or pool is None else (pool.usd_per_hour / hour if hour else 0.0)
    share = share or 0.0
    if wanted.budget is not None and hour > wanted.budget:
        return Rejected(c.name, f"{total} GPUs at ${hour:,.2f}/h are over the budget")
    parts = [(replicas * d.gpus, c.device), *([(total - replicas * d.gpus, pool.candidate.device)] if pool else [])]
    busy = IDLE + (1 - IDLE) * min(1.0, traffic.rate / goodput)
    watts = busy * sum(n * device.power for n, device in parts) if all(one.power for _, one in parts) else None
    tokens = traffic.rate * 3600 / 1e6  # million requests' worth of one token, per hour
    return Offer(
        rank=0, name=name, hardware=c.device.name, hardware_kind=c.device.kind, gpus=d.gpus, total_gpus=total,
        precision=c.precision, replicas=replicas, prefill_replicas=prefill_replicas, attention_dp=d.attention_dp,
        expert_parallel=d.expert_parallel, pipeline=d.pipeline, nodes=_workers(c).nodes, memory=d.memory,
        prefill=_workers(pool.candidate)
        if pool and workers else None, max_model_len=_context_limit(d, traffic),
        batch=round(load.batch, 1), peak_batch=ceil(load.peak_batch), rows=max(1, ceil(full.peak_batch)),
        chunk=min(load.chunk, full.chunk), ttft_ms=ttft * 1e3,
        tpot_ms=load.tpot * 1e3, mean_tpot_ms=load.mean_tpot * 1e3, basis=c.basis,
        goodput=goodput, utilisation=traffic.rate / goodput, headroom=goodput / traffic.rate - 1,
        rate=traffic.rate, watts=watts,
        joules_per_output_token=watts / (traffic.rate * traffic.output_tokens) if watts else None,
        price_per_gpu_hour=price, price_basis=quote.basis, usd_per_hour=hour,
        usd_per_million_input=hour * share / (tokens * traffic.input_tokens),
        usd_per_million_output=hour * (1 - share) / (tokens * traffic.output_tokens), **rest,
    )  # fmt: skip


def _workers(c: Candidate) -> Workers:
    """How one replica of a candidate is spread."""
    layout, link = c.deployment.layout, c.device.link
    return Workers(
        c.device.name, layout.gpus, layout.attention_dp, layout.expert_parallel, layout.pipeline,
        ceil(layout.gpus / link.group) if link else 1,
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
