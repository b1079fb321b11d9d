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
from headway.plan.estimates import calibrated_step, constants
from headway.plan.flags import engine_flags
from headway.plan.replica import Load, LoadedReplica
from headway.plan.traffic import Target, Traffic, check
from headway.roofline.hardware import Hardware
from headway.roofline.step import Layout, StepTime
from headway.shape.formats import nominal_bytes
from headway.shape.model import ModelShape, store_as

BASIS = (
    "Estimates: the exact step-time model with constants fitted on public runs of the engine, and queueing. Basis "
    "calibrated: such runs exist on this kind of device, with their p10-p90 range; extrapolated: they do not."
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
    """One way to build a replica. `basis`: where its constants are from; `low`, `high`: factors to p10 and p90."""

    device: Hardware
    gpus: int
    precision: str
    attention_dp: int
    model: StepTime
    basis: str
    low: float | None
    high: float | None

    @property
    def name(self) -> str:
        parallel = f"TP{self.gpus}" if self.attention_dp == 1 else f"TP{self.gpus} with DP{self.attention_dp} attention"
        return f"{self.gpus} x {self.device.name} {self.precision} {parallel}"


def search(model_name: str, shape: ModelShape, traffic: Traffic, target: Target, wanted: Wanted) -> dict[str, Any]:
    """Ranked deployments (cheapest first), and the rejected ones with reasons."""
    check(traffic, target)
    if wanted.budget is not None and not wanted.budget > 0:
        raise BadInput("--budget", f"{wanted.budget:g}; accepted: dollars per hour above 0")
    if not wanted.degrees or min(wanted.degrees) < 1:
        raise BadInput("--degrees", f"{min(wanted.degrees, default=0)}; accepted: whole numbers from 1")
    if wanted.most < 1:
        raise BadInput("--most", f"{wanted.most}; accepted: a whole number from 1")
    found: list[dict[str, Any]] = []
    rejected: list[dict[str, str]] = []
    for candidate, refusal in candidates(shape, wanted):
        if candidate is None:
            rejected.append(refusal)
            continue
        for row in (_mixed(candidate, traffic, target, wanted), _split(candidate, traffic, target, wanted)):
            if row is None:
                continue
            (rejected if "reason" in row else found).append(row)
    # ties on price are common (a split pool of the same size): the quicker first token goes first
    found.sort(key=lambda row: (row["usd_per_hour"], row["ttft_ms"]))
    best = found[: wanted.most]
    for rank, row in enumerate(best, start=1):
        row["rank"] = rank
        row["flags"] = engine_flags(model_name, shape, row, traffic, wanted.kv)
    return {
        "model": shape.name, "kind": "estimate", "mode": "exact", "basis": BASIS,
        "traffic": msgspec.to_builtins(traffic), "target": msgspec.to_builtins(target), "budget": wanted.budget,
        "deployments": best, "considered": len(found) + len(rejected), "rejected": rejected,
    }  # fmt: skip


def candidates(shape: ModelShape, wanted: Wanted) -> Iterator[tuple[Candidate | None, dict[str, str]]]:
    """Every replica to try, or why one is left out."""
    cached = shape if wanted.kv is None else shape.with_kv_bytes(nominal_bytes(wanted.kv, "--kv"))
    latent = any(group.kind == "latent" for group in shape.groups)
    for device in wanted.hardware:
        if not device.peaks:
            yield None, {"name": device.name, "reason": "no peak arithmetic is catalogued: prefill cannot be timed"}
            continue
        reachable = device.link.group if device.link else 1
        for precision in wanted.precisions:
            stored = cached if precision == "stored" else store_as(cached, precision)
            label = shape.weight_format if precision == "stored" else precision
            for gpus in wanted.degrees:
                name = f"{gpus} x {device.name} {label}"
                if gpus > reachable:
                    yield None, {"name": name, "reason": f"links join {reachable} of these devices at most"}
                    continue
                if stored.heads % gpus or (stored.kv_heads % gpus and gpus % stored.kv_heads):
                    yield None, {"name": name, "reason": f"{stored.heads} heads cannot be split over {gpus} GPUs"}
                    continue
                for attention_dp in sorted({1, gpus}) if latent else (1,):
                    yield _candidate(stored, device, gpus, label, attention_dp, wanted.engine), {}


def _candidate(
    shape: ModelShape, device: Hardware, gpus: int, precision: str, attention_dp: int, engine: str
) -> Candidate:
    """A replica with the constants of its engine, and their range where it was measured on such a device."""
    layout = Layout(gpus, attention_dp)
    known = constants(shape, device, engine, precision, gpus)
    model = StepTime(shape, device, layout, efficiency=known.efficiency, all_reduce=known.all_reduce)
    if calibrated_step(shape, device, engine, precision, gpus)[1]:
        return Candidate(device, gpus, precision, attention_dp, model, "extrapolated", None, None)
    return Candidate(device, gpus, precision, attention_dp, model, "calibrated", known.low, known.high)


def price_of(device: Hardware, wanted: Wanted) -> float | None:
    """Dollars per GPU-hour, the user's figure first."""
    for name, price in wanted.prices.items():
        if name == device.name or name in device.aliases:
            return price
    return device.price.typical if device.price else None


def _mixed(c: Candidate, traffic: Traffic, target: Target, wanted: Wanted) -> dict[str, Any]:
    """Replicas that prefill and decode in the same steps."""
    replica = LoadedReplica(c.model)
    if replica.free <= 0:
        return {"name": c.name, "reason": "the weights do not fit"}
    most, limit = replica.most(traffic, target)
    if most <= 0:
        return {"name": c.name, "reason": _why(limit, replica, traffic)}
    replicas = ceil(traffic.rate / most)
    load = replica.at(traffic.rate / replicas, traffic, target)
    row = _row(c, load, load.ttft, replicas * c.gpus, traffic, wanted, load.prefill_share)
    return row if "reason" in row else row | {
        "name": f"{replicas} x ({c.name})", "replicas": replicas, "prefill_replicas": 0, "goodput": replicas * most,
        "utilisation": traffic.rate / (replicas * most), "headroom": replicas * most / traffic.rate - 1,
        "survives_one_loss": (replicas - 1) * most >= traffic.rate, "limited_by": limit,
    }  # fmt: skip


def _split(c: Candidate, traffic: Traffic, target: Target, wanted: Wanted) -> dict[str, Any] | None:
    """A pool that prefills and one that decodes, the cache shipped between them; None where it makes no sense."""
    if not wanted.split or c.device.kind == "cpu":
        return None
    reader, writer = LoadedReplica(c.model, "prefill"), LoadedReplica(c.model, "decode")
    if reader.free <= 0:
        return None  # the mixed row says that nothing fits
    ship = reader.sequence_bytes(traffic.fresh_tokens) / NETWORK  # every GPU ships its own part
    in_time = None if target.ttft is None else target.ttft - ship
    if in_time is not None and in_time <= 0:
        return {"name": f"split {c.name}", "reason": "shipping one cache takes longer than the TTFT target"}
    first = msgspec.structs.replace(target, ttft=in_time)
    most_read, limit_read = reader.most(traffic, first)
    most_write, limit_write = writer.most(traffic, target)
    if most_read <= 0 or most_write <= 0:
        limit = limit_read if most_read <= 0 else limit_write
        return {"name": f"split {c.name}", "reason": _why(limit, reader, traffic)}
    readers, writers = ceil(traffic.rate / most_read), ceil(traffic.rate / most_write)
    reading = reader.at(traffic.rate / readers, traffic, first)
    load = writer.at(traffic.rate / writers, traffic, target)
    goodput = min(readers * most_read, writers * most_write)
    share = readers / (readers + writers)
    row = _row(c, load, reading.ttft + ship, (readers + writers) * c.gpus, traffic, wanted, share)
    return row if "reason" in row else row | {
        "name": f"{readers} prefill + {writers} decode x ({c.name})", "replicas": writers, "prefill_replicas": readers,
        "goodput": goodput, "utilisation": traffic.rate / goodput, "headroom": goodput / traffic.rate - 1,
        "survives_one_loss": min((readers - 1) * most_read, (writers - 1) * most_write) >= traffic.rate,
        "limited_by": limit_read if readers * most_read < writers * most_write else limit_write,
    }  # fmt: skip


def _row(
    c: Candidate, load: Load, ttft: float, total: int, traffic: Traffic, wanted: Wanted, prefill_share: float
) -> dict[str, Any]:
    """What both kinds of deployment report; a `reason` instead when it cannot be priced or is over budget."""
    price = price_of(c.device, wanted)
    if price is None:
        return {"name": c.name, "reason": "no price is catalogued; give one with --prices"}
    hour = price * total
    if wanted.budget is not None and hour > wanted.budget:
        return {"name": c.name, "reason": f"{total} GPUs at ${hour:,.2f}/h are over the budget"}
    tokens = traffic.rate * 3600 / 1e6  # million requests' worth of one token, per hour
    return {
        "rank": 0, "name": c.name, "hardware": c.device.name, "hardware_kind": c.device.kind, "gpus": c.gpus,
        "total_gpus": total,
        "precision": c.precision, "attention_dp": c.attention_dp, "batch": round(load.batch, 1),
        "peak_batch": ceil(load.peak_batch), "chunk": load.chunk, "ttft_ms": ttft * 1e3, "tpot_ms": load.tpot * 1e3,
        "mean_tpot_ms": load.mean_tpot * 1e3, "basis": c.basis,
        "tpot_p10_ms": None if c.low is None else load.tpot * c.low * 1e3,
        "tpot_p90_ms": None if c.high is None else load.tpot * c.high * 1e3,
        "price_per_gpu_hour": price, "usd_per_hour": hour,
        "usd_per_million_input": hour * prefill_share / (tokens * traffic.input_tokens),
        "usd_per_million_output": hour * (1 - prefill_share) / (tokens * traffic.output_tokens),
    }  # fmt: skip


def _why(limit: str, replica: LoadedReplica, traffic: Traffic) -> str:
    """Why not even a trickle of requests is served."""
    if limit == "memory":
        need, free = replica.sequence_bytes(traffic.mean_context) / 1e9, replica.free / 1e9
        return f"one request's cache takes {need:.1f} GB of the {free:.1f} GB left per GPU, peaks counted"
    return {
        "tpot": "one request alone is slower than the TPOT target",
        "ttft": "one prompt alone takes longer than the TTFT target",
    }.get(limit, "saturated by one request")
