"""A simulation for people: tables for a terminal, and the plots of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway.metrics.document import intervals, latencies, number, rates, targets
from headway.metrics.figures import Draw, plots_of
from headway.metrics.files import to_json
from headway.report.document import Document, Drawing, Folded, Grid, Part, Text
from headway.report.figures import COLOURS
from headway.report.units import dollars, of_devices
from headway.simulate.play import Played
from headway.simulate.seeds import table
from headway.simulate.trail import PARTS

SERIES = (("queue", "requests waiting"), ("running", "requests running"), ("kv_use", "share of cache blocks owned"))


def document(played: Played) -> Document:
    """One simulation."""
    s = played.summary
    where = f"{s['model']} on {of_devices(s['hardware'], s['gpus'], s['replicas'])}, policy {s['setup']['policy']}"
    requests = s["requests"]
    return Document(f"{where}: {requests['completed']} of {requests['total']} completed", [
        *(Text(f"warning: {warning}", "warn") for warning in s["warnings"]), latencies(s),
        *([table(s["seeds"])] if "seeds" in s else []),
        Text(f"step time: {s['step_time']}", "note"), *rates(s), *targets(s), *_cost(s["cost"]), _steps(s),
        *(_fleet(s["fleet"]) if "fleet" in s else []),
        *([_beside(s)] if "measured" in s else []), _little(s["little"]),
    ], [
        intervals(s), *map(Drawing, plots_of(played.run.records, {})),
        *(Drawing(over_time({s["setup"]["policy"]: s}, *of)) for of in SERIES),
        *([Drawing(over_time({"replicas": s["fleet"]}, "up", "replicas up"))] if "fleet" in s else []),
        Folded("All numbers", to_json(s)),
    ])  # fmt: skip


def comparison(several: Mapping[str, Played]) -> Document:
    """Several policies beside each other."""
    head = ["policy", "TTFT p50", "p99", "TPOT p50", "p99", "E2E p50", "output tokens/s", "met targets", "preemptions"]
    rows = []
    for name, played in several.items():
        s = played.summary
        cells = [s[key][p] for key in ("ttft_ms", "tpot_ms") for p in ("p50", "p99")]
        slo = s.get("slo", {}).get("attainment")
        rows.append([
            name, *map(number, cells), number(s["e2e_ms"]["p50"]), number(s["throughput"]["output"]),
            "-" if slo is None else f"{slo:.1%}", str(s["steps"]["preemptions"]),
        ])  # fmt: skip
    first = next(iter(several.values())).summary
    where = of_devices(first["hardware"], first["gpus"], first["replicas"])
    summaries = {name: played.summary for name, played in several.items()}
    warnings = [Text(f"{name}: {w}", "warn") for name, s in summaries.items() for w in s["warnings"]]
    return Document(f"{first['model']} on {where}, ms", [
        *warnings, Grid(head, rows), Text(f"step time: {first['step_time']}", "note"),
    ], [
        *(Drawing(distribution(several, key, label)) for key, label in (
            ("ttft_ms", "time to first token, ms"), ("tpot_ms", "time per output token, ms"))),
        *(Drawing(over_time(summaries, *of)) for of in SERIES),
        *(Folded(f"All numbers, {name}", to_json(s)) for name, s in summaries.items()),
    ])  # fmt: skip


def over_time(summaries: Mapping[str, Mapping[str, Any]], key: str, label: str) -> Draw:
    """A series of each, over time."""

    def draw(axes: Any) -> None:
        for (name, summary), colour in zip(summaries.items(), COLOURS, strict=False):
            points = summary[key]["series"]
            axes.step(*_columns(points), where="post", color=colour, label=name, linewidth=1)
        axes.legend(fontsize="small")
        axes.set(xlabel="seconds", ylabel=label, title=label[0].upper() + label[1:])

    return draw


def distribution(several: Mapping[str, Played], key: str, label: str) -> Draw:
    """Of a latency, by policy."""

    def draw(axes: Any) -> None:
        for (name, played), colour in zip(several.items(), COLOURS, strict=False):
            values = sorted(v for record in played.run.records if (v := getattr(record, key)) is not None)
            shares = [(index + 1) / len(values) for index in range(len(values))]
            axes.step(values, shares, where="post", color=colour, label=name)
        axes.legend(fontsize="small")
        axes.set(xlabel=label, ylabel="share of requests", ylim=(0, 1.02), title=f"Distribution of {label}")

    return draw


def _columns(points: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    return [point[0] for point in points], [point[1] for point in points]


def _cost(found: Mapping[str, Any]) -> list[Part]:
    if "reason" in found:
        return []
    output, total = dollars(found["per_million_output"]), dollars(found["per_million_total"])
    return [Text(f"{output} per million output tokens, {total} per million of all, at "
                 f"{dollars(found['dollars_per_gpu_hour'])} per device and hour, idle time included")]  # fmt: skip


def _fleet(fleet: Mapping[str, Any]) -> list[Part]:
    """What became of its replicas."""
    rows = [
        [of_devices(kind["hardware"], kind["gpus"], 1), str(kind["started"]), number(kind["device_hours"]),
         f"{kind['slow']:g}x"] for kind in fleet["kinds"]
    ]  # fmt: skip
    told = (
        f"at most {fleet['most_up']} replicas up; {fleet['ended']} ended, {fleet['failures']} failed: "
        f"{fleet['tried_again']} requests were tried elsewhere, {fleet['lost']} lost"
    )
    return [Grid(["replica", "started", "device-hours", "steps take"], rows), Text(told)]


def _beside(s: Mapping[str, Any]) -> Part:
    """What the log measured, beside what it would be here."""
    was = s["measured"]
    rows = [
        [f"{label} {p}, ms", number(was[key][p]), number(s[key][p])]
        for key, label in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT"), ("e2e_ms", "E2E")) for p in ("mean", "p50", "p99")
    ]  # fmt: skip
    rows.append(["output tokens/s", number(was["throughput"]["output"]), number(s["throughput"]["output"])])
    if "slo" in s:
        rows.append(["met all targets", *(f"{one['slo']['attainment']:.1%}" for one in (was, s))])
    return Grid(["", "measured", "simulated"], rows, "What the log measured, and what would be here")


def _steps(s: Mapping[str, Any]) -> Part:
    steps, kv = s["steps"], s["kv_use"]
    if not steps["count"]:
        return Text("no step: every request was refused")
    return Text(
        f"{steps['count']:,} steps of {number(steps['mean_ms'])} ms, {number(steps['tokens_per_step'])} new tokens and "
        f"{number(steps['rows_per_step'])} rows each; busy {steps['busy_share']:.0%} of the time; "
        f"cache at most {kv['max']:.0%} owned; {steps['preemptions']} preemptions"
    )


def _little(law: Mapping[str, Any]) -> Part:
    rows = [
        [part, *(number(law[part][key]) for key in ("mean_inside", "rate", "mean_seconds", "rate_times_seconds"))]
        for part in (*PARTS, "system")
    ]
    return Grid(["Little's law", "L counted", "arrivals/s", "W, s", "rate x W"], rows)
