"""One simulation of a fleet, summed up as one of equal replicas, with what became of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headway.core.clock import to_seconds
from headway.core.errors import BadInput
from headway.core.receipts import dollars
from headway.metrics.run import Run
from headway.metrics.summary import Targets
from headway.roofline.hardware import Hardware
from headway.roofline.profile import Profile
from headway.shape.model import ModelShape
from headway.simulate.deploy import Deployed, deployed
from headway.simulate.driver import Source, run
from headway.simulate.fleet import SimulatedFleet
from headway.simulate.fleet_file import FIELD, FleetFile
from headway.simulate.front import Front
from headway.simulate.play import Played, cost, per_million, summary_of
from headway.simulate.trail import DETAIL, Trail
from headway.simulate.workload import Answers
from headway.traffic.load import Load


def kinds_of(
    file: FleetFile, shape: ModelShape, device: Callable[[str], tuple[Hardware, Profile | None]]
) -> list[Deployed]:
    """Every kind, ready to be simulated. device: a device by the name in the file, and its profile if it was measured.

    Raises:
        BadInput: one does not fit, or is not known.
    """
    found = []
    for number, kind in enumerate(file.kinds):
        asked = kind.options
        try:
            hardware, profile = device(asked.hardware)
            found.append(deployed(
                shape, hardware, asked.tp, kind.setup, precision=asked.precision, kv=asked.kv, profile=profile,
                price=asked.price,
            ))  # fmt: skip
        except BadInput as error:
            raise BadInput(FIELD, f"[[replicas]] {number}: {error}") from None
    return found


def play_fleet(
    file: FleetFile, kinds: Sequence[Deployed], source: Source, load: Load, *, targets: Targets | None = None,
    detail: int = DETAIL, seed: int = 0, progress: Callable[[int], None] = lambda ended: None,
) -> Played:  # fmt: skip
    """Simulate a fleet under a load until every request has ended. seed: of failures at random."""
    asked, first = file.options, kinds[0]
    answers, trail = Answers(), Trail(detail)
    cached = any(kind.setup.prefix_cache for kind in kinds)
    front = Front(
        asked.router, 0, blocks=int(cached), block_size=first.limits.block_size, most=asked.most_in_flight
    )  # fmt: skip
    fleet = SimulatedFleet(file, kinds, front, answers, seed)
    end = run(
        fleet.replicas, source, trail, answers, front,
        progress=lambda now: progress(len(trail.records)), changes=fleet,
    )  # fmt: skip
    if not trail.records:
        raise BadInput("--requests", "the load holds no request")
    trail.close(end)
    found = Run(load, sorted(trail.records, key=lambda record: record.index))
    busy = sum(replica.executor.busy for replica in fleet.replicas)
    summary = summary_of(first, found, trail, busy, fleet.most_up, targets, asked.router)
    summary["fleet"] = _became(fleet, end)
    up = sum(one["device_hours"] / one["gpus"] for one in summary["fleet"]["kinds"])
    summary["steps"]["busy_share"] = to_seconds(busy) / (3600 * up) if up else None
    if len(kinds) > 1:
        summary["hardware"] = ", ".join(dict.fromkeys(kind.priced.hardware.name for kind in kinds))
    summary["cost"] = _cost(fleet, summary, end)
    return Played(summary, found, trail)


def _became(fleet: SimulatedFleet, end: int) -> dict[str, Any]:
    hours = [seconds / 3600 for seconds in fleet.device_seconds(end)]
    kinds = [
        {
            "hardware": kind.priced.hardware.name, "gpus": kind.priced.gpus, "slow": described.options.slow,
            "started": sum(member.kind == number for member in fleet.members), "device_hours": hours[number],
        }
        for number, (kind, described) in enumerate(zip(fleet.kinds, fleet.file.kinds, strict=True))
    ]  # fmt: skip
    return {
        "kinds": kinds, **fleet.counts, "most_up": fleet.most_up, "up": {"series": fleet.sizes.column("up")},
        "starting": {"series": fleet.sizes.column("starting")},
    }  # fmt: skip


def _cost(fleet: SimulatedFleet, summary: dict[str, Any], end: int) -> dict[str, Any]:
    """Dollars of every replica from when it was asked for until it was given back."""
    seconds = fleet.device_seconds(end)
    unknown = [kind for kind, spent in zip(fleet.kinds, seconds, strict=True) if spent and kind.price is None]
    if unknown:
        return cost(unknown[0], summary["throughput"], 0.0, 1)
    spent = sum(dollars(one, kind.price or 0.0) for kind, one in zip(fleet.kinds, seconds, strict=True))
    hours = sum(seconds) / 3600
    return per_million(spent, spent / hours if hours else 0.0, summary["throughput"])
