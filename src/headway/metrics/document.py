"""The parts of a document that every run has, measured or simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headway.report.document import Grid, Text

LATENCIES = {
    "ttft_ms": "time to first token",
    "ttfa_ms": "time to first answer token",
    "tpot_ms": "time per output token",
    "itl_token_ms": "inter-token latency, per token",
    "itl_chunk_ms": "inter-token latency, per chunk",
    "e2e_ms": "end to end, last token",
    "e2e_done_ms": "end to end, end mark",
}
PERCENTILES = ("mean", "p50", "p90", "p95", "p99")


def latencies(summary: Mapping[str, Any]) -> Grid:
    """Every latency's mean and percentiles."""
    rows = [
        [label, *(number(summary[key][name]) for name in PERCENTILES), str(summary[key]["n"])]
        for key, label in LATENCIES.items()
    ]
    return Grid(["ms", *PERCENTILES, "n"], rows)


def intervals(summary: Mapping[str, Any]) -> Grid:
    """How far the percentiles may be off, and why some are not given."""

    def interval(bounds: tuple[float, float] | None) -> str:
        return f"{number(bounds[0])} to {number(bounds[1])}" if bounds else "-"

    rows = [
        [label, *(interval(summary[key].get("ci95", {}).get(name)) for name in PERCENTILES[1:]),
         summary[key]["reason"] or ""]
        for key, label in LATENCIES.items()
    ]  # fmt: skip
    return Grid(["ms", *PERCENTILES[1:], "why not all"], rows, "95 % order-statistic intervals", left=("why not all",))


def rates(summary: Mapping[str, Any]) -> Iterator[Text]:
    rates = summary["throughput"]
    yield Text(
        f"throughput: {number(rates['output'])} output, {number(rates['input'])} input, {number(rates['total'])} total "
        f"tokens/s; {number(rates['requests'])} requests/s"
    )
    seed = f"; seed: {summary['workload']['seed']}" if "workload" in summary else ""
    yield Text(f"cached prompt tokens: {number(summary['cached_tokens']['total'])}{seed}")


def targets(summary: Mapping[str, Any]) -> Iterator[Text]:
    if slo := summary.get("slo"):
        low, high = slo["ci95"]
        share = "no request" if slo["attainment"] is None else f"{slo['attainment']:.1%} of {slo['requests']}"
        verdict = "held" if slo["held"] else "not held"
        if slo["needed"] is not None and not slo["held"]:
            verdict = f"not proven yet: this share of {slo['needed']} requests would prove it"
        interval = f"95 % interval {low:.1%} to {high:.1%}"
        yield Text(f"targets met by {share} ({interval}), wanted {slo['attainment_target']:.0%}: {verdict}")
    if good := summary.get("goodput"):
        yield Text(f"goodput: {number(good['rate'])} requests/s" + (f" ({good['reason']})" if good["reason"] else ""))


def number(value: float | None) -> str:
    """For people: two decimals below 1000, none above, a dash for nothing."""
    return "-" if value is None else f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"
