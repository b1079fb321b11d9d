"""What one `headway simulate` leaves: a simulation per policy, the rate searched, and the files asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from headway.core.errors import BadInput
from headway.metrics import goodput
from headway.metrics.files import Files
from headway.metrics.summary import Targets, summarize
from headway.metrics.views import VIEWS, view
from headway.report.document import Document, Text
from headway.routing.autoscale import MOST_REPLICAS
from headway.simulate.deploy import Deployed
from headway.simulate.document import comparison, document
from headway.simulate.fleet_file import FleetFile
from headway.simulate.play import Played, play
from headway.simulate.play_fleet import play_fleet
from headway.simulate.seeds import spread
from headway.simulate.served import measured
from headway.simulate.traffic import Traffic

Report = Callable[[str, int, int | None], None]  # (what, done, of)
RESOLUTION = 0.05  # of a searched rate
LOWEST = 1 / 1024  # of the first rate, below which a search gives up, as it does so far above it


@dataclass(frozen=True)
class Outcome:
    """Simulations by policy, in the order asked for. `load`: what was played, in words."""

    played: Mapping[str, Played]
    load: str

    def json(self) -> dict[str, Any]:
        """One object; of several policies, an object of them by name."""
        summaries = {name: one.summary for name, one in self.played.items()}
        return next(iter(summaries.values())) if len(summaries) == 1 else {"policies": summaries}

    def document(self) -> Document:
        several = len(self.played) > 1
        shown = comparison(self.played) if several else document(next(iter(self.played.values())))
        return replace(shown, parts=[Text(self.load), *shown.parts])


class Equal(msgspec.Struct, frozen=True):
    """Equal replicas of a deployment behind a router."""

    one: Deployed
    replicas: int = 1
    router: str = "round-robin"
    most_in_flight: int | None = None

    @property
    def policy(self) -> str:
        return self.one.setup.policy

    @property
    def gpus(self) -> int:
        """Devices of all replicas."""
        return self.one.priced.gpus * self.replicas

    def play(self, traffic: Traffic, targets: Targets | None, progress: Callable[[int], None]) -> Played:
        if not 1 <= self.replicas <= MOST_REPLICAS:
            raise BadInput("--replicas", f"{self.replicas} is not a whole number from 1 to {MOST_REPLICAS}")
        one = msgspec.structs.replace(self.one, seed=traffic.seed)
        return play(
            one, traffic.source(one.limits.max_model_len), traffic.load, replicas=self.replicas, router=self.router,
            most_in_flight=self.most_in_flight, targets=targets, progress=progress,
        )  # fmt: skip


class Mixed(msgspec.Struct, frozen=True):
    """A fleet."""

    file: FleetFile
    kinds: Sequence[Deployed]

    @property
    def policy(self) -> str:
        return self.kinds[0].setup.policy

    @property
    def gpus(self) -> int:
        """Devices of the replicas that are there at the start; of one of each kind if none is."""
        counts = [kind.options.count for kind in self.file.kinds]
        counts = counts if any(counts) else [1] * len(counts)
        return sum(count * kind.priced.gpus for count, kind in zip(counts, self.kinds, strict=True))

    def play(self, traffic: Traffic, targets: Targets | None, progress: Callable[[int], None]) -> Played:
        kinds = [msgspec.structs.replace(kind, seed=traffic.seed) for kind in self.kinds]
        longest = min(kind.limits.max_model_len for kind in kinds)
        return play_fleet(
            self.file, kinds, traffic.source(longest), traffic.load, targets=targets, seed=traffic.seed,
            progress=progress,
        )  # fmt: skip


def simulate_all(
    systems: Sequence[Equal | Mixed], traffic: Traffic, targets: Targets | None, as_tool: str | None, search: bool,
    report: Report,
) -> Outcome:  # fmt: skip
    """Simulate the load under every system.

    Raises:
        BadInput: options that make no sense together.
    """
    if as_tool is not None and as_tool not in VIEWS:
        raise BadInput("--as", f"{as_tool!r} is not one of {', '.join(VIEWS)}")
    if search and traffic.rate is None:
        raise BadInput("--search", "needs --rate, where to begin")
    found: dict[str, Played] = {}
    for system in systems:
        name = system.policy

        def once(load: Traffic, what: str, system: Equal | Mixed = system) -> Played:
            return system.play(load, targets, lambda ended: report(what, ended, load.requests))

        played = found[name] = once(traffic, f"simulating, {name}")
        if traffic.seeds > 1:
            seeds = range(traffic.seed, traffic.seed + traffic.seeds)
            others = [once(msgspec.structs.replace(traffic, seed=seed), f"simulating, {name}") for seed in seeds[1:]]
            played.summary["seeds"] = spread([one.summary for one in (played, *others)], seeds)
        if traffic.log is not None:
            played.summary["measured"] = summarize(measured(traffic.log), targets)
        if as_tool is not None:
            played.summary["as"] = view(as_tool, played.run, "completions")
        if search:
            gpus = system.gpus
            key = "saturation" if targets is None else "goodput"
            searched = saturation if targets is None else _goodput
            played.summary[key] = searched(once, traffic, targets, gpus, name)
    return Outcome(found, traffic.text())


Once = Callable[[Traffic, str], Played]


def _goodput(once: Once, traffic: Traffic, targets: Targets | None, gpus: int, name: str) -> dict[str, Any]:
    """As a bench searches it: batches at each rate until the share is decided."""
    assert targets is not None and traffic.rate is not None
    sent = 0

    async def batch(rate: float, requests: int, look: int) -> tuple[int, int]:
        nonlocal sent
        sent += 1
        played = once(traffic.at(rate, requests, traffic.seed + sent), f"searching, {name}: {rate:.3g}/s")
        slo = played.summary["slo"]
        return slo["good"], slo["requests"]

    return asyncio.run(goodput.search(batch, traffic.rate, traffic.requests, targets.attainment, RESOLUTION, gpus))


def saturation(once: Once, traffic: Traffic, targets: Targets | None, gpus: int, name: str) -> dict[str, Any]:
    """The highest rate that the system keeps up with."""
    assert traffic.rate is not None
    trials: list[dict[str, Any]] = []
    held, failed, rate = 0.0, float("inf"), traffic.rate
    least, most = traffic.rate * LOWEST, traffic.rate / LOWEST
    while failed > held * (1 + RESOLUTION) and least < rate < most and len(trials) < 40:
        played = once(traffic.at(rate, traffic.requests, traffic.seed), f"searching, {name}: {rate:.3g}/s")
        stable = played.summary["stability"]["stable"]
        trials.append({"rate": rate, "stable": stable, "output": played.summary["throughput"]["output"]})
        held, failed = (rate, failed) if stable else (held, rate)
        rate = goodput.next_rate(held, failed)
    return {
        "rate": held or None, "per_gpu": held / gpus if held else None,
        "fails_at": None if failed == float("inf") else failed, "resolution": RESOLUTION, "trials": trials,
    }  # fmt: skip


def write(files: Files, outcome: Outcome, command: str) -> None:
    """Leave the files that were asked for. `command`: what was typed, for the page.

    Raises:
        BadInput: one cannot be written, or cannot hold several policies.
    """
    if (files.csv or files.records) and len(outcome.played) > 1:
        raise BadInput("--csv" if files.csv else "--records", "holds one simulation; give one policy")
    files.write(outcome.document, next(iter(outcome.played.values())).run, "completions", command)
