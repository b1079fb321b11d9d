"""One simulation from a deployment and a load: played, summed up as `headway bench` sums up a measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from headway.core.clock import to_seconds
from headway.core.errors import BadInput
from headway.core.receipts import dollars
from headway.metrics import goodput
from headway.metrics.run import Run
from headway.metrics.stability import stability_of
from headway.metrics.summary import Targets, summarize
from headway.roofline.queueing import little
from headway.simulate.deploy import Deployed
from headway.simulate.driver import Source, run
from headway.simulate.front import Front, prefill_seconds
from headway.simulate.plain import play_plain
from headway.simulate.trail import DETAIL, PARTS, Trail
from headway.simulate.workload import Answers
from headway.traffic.load import Load

IN_TURN = "round-robin"


class Played(msgspec.Struct):
    """A simulation's summary, the records and series behind it, and what was simulated."""

    summary: dict[str, Any]
    run: Run
    trail: Trail


def play(
    deployed: Deployed,
    source: Source,
    load: Load,
    *,
    replicas: int = 1,
    router: str = IN_TURN,
    most_in_flight: int | None = None,
    targets: Targets | None = None,
    detail: int = DETAIL,
    progress: Callable[[int], None] = lambda ended: None,
) -> Played:
    """Simulate `replicas` equal replicas under a load until every request has ended.

    Args:
        router: name of a routing policy.
        most_in_flight: requests of a replica; the others wait at the router. None = they wait at the replicas.

    Raises:
        BadInput: no such policy.
    """
    front = front_of(deployed, replicas, router, most_in_flight)
    in_turn = router == IN_TURN and most_in_flight is None
    told = play_plain(deployed, source, replicas, in_turn, detail, progress)
    trail, busy = told or _play(deployed, source, replicas, front, detail, progress)
    found = Run(load, sorted(trail.records, key=lambda record: record.index))
    return Played(summary_of(deployed, found, trail, busy, replicas, targets, router), found, trail)


def _play(
    deployed: Deployed, source: Source, replicas: int, front: Front, detail: int, progress: Callable[[int], None]
) -> tuple[Trail, int]:
    """Through the scheduler that serves -> what happened, and ps of all steps."""
    answers, trail = Answers(alike=not deployed.setup.prefix_cache), Trail(detail)
    copies = [deployed.replica(answers, number=number) for number in range(replicas)]
    end = run(
        copies, source, trail, answers, front,
        progress=lambda now: progress(trail.counts["finished"] + trail.counts["refused"]),
    )  # fmt: skip
    if not trail.records:
        raise BadInput("--requests", "the load holds no request")
    trail.close(end)
    return trail, sum(copy.executor.busy for copy in copies)


def front_of(deployed: Deployed, replicas: int, router: str, most_in_flight: int | None = None) -> Front:
    """The router before so many of them.

    Raises:
        BadInput: no such policy, or no such number of requests.
    """
    setup, limits = deployed.setup, deployed.limits
    chunk = min(limits.max_tokens_per_step, deployed.budget.tokens or limits.max_tokens_per_step)
    prefill = prefill_seconds(deployed.model, deployed.priced.shape, chunk)
    blocks = min(limits.blocks) if setup.prefix_cache else 0
    return Front(router, replicas, prefill, blocks=blocks, block_size=limits.block_size, most=most_in_flight)


def summary_of(
    deployed: Deployed, found: Run, trail: Trail, busy: int, replicas: int, targets: Targets | None, router: str
) -> dict[str, Any]:  # fmt: skip
    """What bench says of a measurement, and what only a simulation knows. busy: ps of all steps."""
    priced, setup = deployed.priced, deployed.setup
    summary: dict[str, Any] = {
        "model": priced.shape.name, "hardware": priced.hardware.name, "gpus": priced.gpus, "replicas": replicas,
        "precision": priced.precision, "step_time": deployed.label, "router": router,
        "setup": msgspec.to_builtins(setup) | {"budget": msgspec.to_builtins(deployed.budget)},
        "limits": msgspec.to_builtins(deployed.limits),
    }  # fmt: skip
    summary |= summarize(found, targets)
    seconds, worked = trail.seconds, to_seconds(busy)
    summary["steps"] = {
        "count": trail.steps, "mean_ms": 1e3 * worked / trail.steps if trail.steps else None,
        "busy_share": worked / seconds / replicas if seconds else None,
        "tokens_per_step": trail.step_tokens / trail.steps if trail.steps else None,
        "rows_per_step": trail.step_rows / trail.steps if trail.steps else None, "preemptions": trail.preemptions,
    }  # fmt: skip
    summary["queue"] = {"mean": trail.mean("queue"), "series": trail.series.column("waiting")}
    batch = trail.step_rows / trail.steps if trail.steps else None
    summary["batch"] = {"mean": batch, "series": trail.series.column("batch")}
    summary["running"] = {"series": trail.series.column("running")}
    for name in ("kv_use", "kv_filled"):
        column = trail.series.column(name)
        summary[name] = {"max": max((use for _, use in column), default=0.0), "series": column}
    summary["cost"] = cost(deployed, summary["throughput"], seconds, replicas)
    summary["little"] = _little(trail, seconds)
    summary["stability"] = stability_of(found.records)
    if "slo" in summary:
        good = summary["slo"]["good"] / seconds if seconds else None
        summary["goodput"] = goodput.single(summary["slo"], summary["load"].get("intended_rate"), good)
    summary["warnings"] = [] if summary["stability"]["stable"] else [summary["stability"]["statement"]]
    return summary


def cost(deployed: Deployed, throughput: Mapping[str, Any], seconds: float, replicas: int) -> dict[str, Any]:
    """Dollars of the whole time, idle included, per million tokens."""
    priced, hourly = deployed.priced, deployed.price
    if hourly is None:
        return {"reason": f"{priced.hardware.name} has no price in the catalogue; give --price"}
    spent = dollars(seconds, hourly * priced.gpus * replicas)
    return per_million(spent, hourly, throughput)


def per_million(spent: float, hourly: float, throughput: Mapping[str, Any]) -> dict[str, Any]:
    """Dollars over tokens. hourly: of a device."""
    tokens = {"output": throughput["output_tokens"], "total": throughput["output_tokens"] + throughput["input_tokens"]}
    return {
        "dollars_per_gpu_hour": hourly, "dollars": spent,
        **{f"per_million_{name}": 1e6 * spent / count if count else None for name, count in tokens.items()},
    }  # fmt: skip


def _little(trail: Trail, seconds: float) -> dict[str, Any]:
    """L = lambda W, for each part and the whole: the number inside as it was counted over time, beside the rate of
    arrivals times the mean time that ended requests spent there."""
    arrived = trail.counts["arrived"]
    rate = arrived / seconds if seconds else 0.0

    def law(inside: float, waited: float) -> dict[str, float | None]:
        expected = little(rate, waited)
        error = 100 * (inside / expected - 1) if expected else None
        return {"mean_inside": inside, "rate": rate, "mean_seconds": waited, "rate_times_seconds": expected,
                "error_pct": error}  # fmt: skip

    rows = {part: law(trail.mean(part), to_seconds(trail.spent[part]) / arrived) for part in PARTS}
    whole = law(sum(map(trail.mean, PARTS)), to_seconds(sum(trail.spent.values())) / arrived)
    return rows | {"system": whole}
