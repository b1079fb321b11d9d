"""The same load drawn anew: how much of a figure is the draw of arrivals, lengths and the noise of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway.metrics.document import number
from headway.metrics.stats import CONFIDENCE, interval, percentile
from headway.report.document import Grid

LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")
FIGURES = ("mean", "p50", "p99")


def spread(summaries: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> dict[str, Any]:
    """Of each figure over all seeds: its median, the least and the most, and a 95 % interval of the median (null of
    fewer than six seeds). A figure that a run has none of (too few requests) is null."""
    found: dict[str, Any] = {"seeds": list(seeds)}
    for name in LATENCIES:
        found[name] = {key: _spread([one[name][key] for one in summaries]) for key in FIGURES}
    found["throughput"] = {"output": _spread([one["throughput"]["output"] for one in summaries])}
    return found


def _spread(values: Sequence[float | None]) -> dict[str, Any] | None:
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    held = interval(known, 0.5, CONFIDENCE)
    return {
        "median": percentile(known, 0.5), "least": min(known), "most": max(known),
        "ci95": None if held is None else list(held),
    }  # fmt: skip


def table(found: Mapping[str, Any]) -> Grid:
    """For people."""
    labels = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E"}
    figures = [(f"{labels[name]} {key}, ms", found[name][key]) for name in LATENCIES for key in FIGURES]
    figures.append(("output tokens/s", found["throughput"]["output"]))
    rows = []
    for label, one in figures:
        if one is not None:
            held = "-" if one["ci95"] is None else " to ".join(map(number, one["ci95"]))
            rows.append([label, number(one["median"]), held, number(one["least"]), number(one["most"])])
    return Grid(["", "median", "95 % interval", "least", "most"], rows, f"Over {len(found['seeds'])} seeds")
