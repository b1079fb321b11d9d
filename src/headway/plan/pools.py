"""Prefill pools of split deployments: which candidates can be their workers, and how many it takes."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import msgspec

from headway.plan.candidates import Candidate, Wanted, price_of
from headway.plan.load import most
from headway.plan.traffic import Target, Traffic
from headway.roofline.deployment import Deployment
from headway.roofline.hardware import NETWORK


class PrefillPool(msgspec.Struct, frozen=True):
    """Workers that only prefill: how many of a candidate carry the traffic, what one carries, what breaks above."""

    candidate: Candidate
    workers: int
    each: float
    limit: str
    usd_per_hour: float

    def carrying(self, rate: float) -> PrefillPool:
        """With as many workers as a rate takes."""
        workers = ceil(rate / self.each)
        return msgspec.structs.replace(self, workers=workers, usd_per_hour=self.usd_per_hour / self.workers * workers)


def prefill_pools(tried: Sequence[Candidate], traffic: Traffic, target: Target, wanted: Wanted) -> list[PrefillPool]:
    """Every candidate that can be one, and how many it takes; 0 workers where even one prompt is too slow."""
    devices, found = wanted.prefill_hardware or wanted.hardware, []
    for c in tried:
        price = price_of(c.device, wanted)
        if (
            not any(c.device is one for one in devices)
            or c.device.kind == "cpu"
            or c.deployment.pipeline > 1
            or price is None
        ):
            continue
        if c.deployment.memory.room <= c.deployment.cache(traffic.longest):
            continue  # the mixed row says what does not fit
        first = before_shipping(c.deployment, traffic, target)
        if first is None:
            found.append(PrefillPool(c, 0, 0.0, "shipping", 0.0))
            continue
        each, limit = most(lambda rate, c=c, first=first: c.decode.prefilling(rate, traffic, first))  # type: ignore[misc]
        workers = ceil(traffic.rate / each) if each > 0 else 0
        found.append(PrefillPool(c, workers, each, limit, workers * c.deployment.gpus * price.usd))
    return found


def pools_for(c: Candidate, pools: Sequence[PrefillPool], wanted: Wanted) -> list[PrefillPool]:
    """What to put before a decode pool of this candidate: workers like its own, and the cheapest of its precision."""
    mine = [pool for pool in pools if pool.candidate.precision == c.precision]
    able = [pool for pool in mine if pool.workers]
    own = [pool for pool in mine if pool.candidate is c]
    if not wanted.prefill_hardware:  # caches are not shipped between makers' devices unless somebody asks for it
        able = [pool for pool in able if pool.candidate.device is c.device]
    cheapest = [min(some, key=lambda pool: pool.usd_per_hour) for some in (
        [pool for pool in able if pool.candidate.device is c.device], able,
    ) if some]  # fmt: skip
    return list({id(pool): pool for pool in (*own, *cheapest)}.values())


def before_shipping(d: Deployment, traffic: Traffic, target: Target) -> Target | None:
    """The target less the seconds that shipping a cache takes; None where nothing is left."""
    if target.ttft is None:
        return target
    left = target.ttft - shipping(d, traffic)
    return msgspec.structs.replace(target, ttft=left) if left > 0 else None


def shipping(d: Deployment, traffic: Traffic) -> float:
    """Seconds until a request's cache is with the decode pool: every GPU ships its own part."""
    return d.cache(traffic.fresh_tokens) / NETWORK
