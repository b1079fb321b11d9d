"""A run for people, put together once: the terminal shows the tables, the page the plots and all numbers as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headway.bench.figures import plots_of, splits
from headway.bench.load import Run
from headway.bench.report import to_json
from headway.bench.server import AROUND, PARTS
from headway.report.document import Document, Drawing, Folded, Grid, Listing, Part, Text

COUNTS = {  # of the server's event log
    "cached": "prompt tokens from the cache", "recomputed": "tokens computed again after preemptions",
    "preemptions": "preemptions",
}  # fmt: skip
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


def document(summary: dict[str, Any], run: Run) -> Document:
    """What was measured, what failed, and whether the client was the bottleneck."""
    records = [record for record in run.records if record.sent]
    requests, prediction, server = summary["requests"], summary.get("prediction"), summary.get("server", {})
    where = f"{summary['model']} at {summary['url']} ({summary['api']})"
    rows = [
        [label, *(number(summary[key][name]) for name in PERCENTILES), str(summary[key]["n"])]
        for key, label in LATENCIES.items()
    ]
    waits = server.get("events", {}).get("requests", {})
    return Document(f"{where}: {requests['completed']} of {requests['total']} completed", [
        *_problems(summary), Grid(["ms", *PERCENTILES, "n"], rows), Text(summary["percentiles"]["method"], "note"),
        *_rates(summary), *(_prediction(prediction) if prediction else []), *_server(server), *_targets(summary),
        *_self_test(summary["client"]["self_test"]),
    ], [
        _intervals(summary), *map(Drawing, plots_of(records, (prediction or {}).get("metrics", {}))),
        *([Drawing(splits(waits, records))] if waits else []), Folded("All numbers", to_json(summary)),
    ])  # fmt: skip


def _intervals(summary: dict[str, Any]) -> Grid:
    """How far the percentiles may be off, and why some are not given."""

    def interval(bounds: tuple[float, float] | None) -> str:
        return f"{number(bounds[0])} to {number(bounds[1])}" if bounds else "-"

    rows = [
        [label, *(interval(summary[key].get("ci95", {}).get(name)) for name in PERCENTILES[1:]),
         summary[key]["reason"] or ""]
        for key, label in LATENCIES.items()
    ]  # fmt: skip
    return Grid(["ms", *PERCENTILES[1:], "why not all"], rows, "95 % order-statistic intervals", left=("why not all",))


def _rates(summary: dict[str, Any]) -> Iterator[Text]:
    rates = summary["throughput"]
    yield Text(
        f"throughput: {number(rates['output'])} output, {number(rates['input'])} input, {number(rates['total'])} total "
        f"tokens/s; {number(rates['requests'])} requests/s"
    )
    seed = summary["workload"]["seed"] if "workload" in summary else "-"
    yield Text(f"cached prompt tokens: {number(summary['cached_tokens']['total'])}; seed: {seed}")


def _prediction(found: dict[str, Any]) -> list[Part]:
    """Measured beside predicted, with the terms of the prediction."""
    if "metrics" not in found:
        return [Text(f"no prediction: {found['reason']}", "warn")]
    estimated = found["kind"] == "estimate"
    head = ["ms", "measured p50", found["kind"], *(["range", "bound"] if estimated else []), "ratio", "unexplained"]
    rows, parts = [], []
    for key, row in found["metrics"].items():
        span = [" to ".join(map(number, row["range"])), number(row["bound"])] if estimated else []
        figures = (number(row[name]) for name in ("measured_over_predicted", "unexplained"))
        rows.append([LATENCIES[key], number(row["measured"]), number(row["predicted"]), *span, *figures])
        terms = sorted(row["terms"].items(), key=lambda term: -term[1])
        if terms:
            parts.append(f"{LATENCIES[key]}: {', '.join(f'{name} {number(value)}' for name, value in terms[:4])}")
    where = f"{found['model']} on {found['gpus']} x {found['hardware']}"
    title = f"Prediction: the {found['kind']} of {where}, batch {found['batch']:.1f}"
    shares = [f"{name} {found[key]:.1%}" for key, name in (("mbu", "MBU"), ("mfu", "MFU")) if found[key] is not None]
    lines: list[Part] = [
        Grid(head, rows, title), Listing("largest terms, ms", parts), Text("; ".join([*shares, found["label"]]))
    ]  # fmt: skip
    return [*lines, Text(found["reason"], "bad")] if found["reason"] else lines


def server_rows(found: dict[str, Any]) -> list[list[str]]:
    """[what, mean, p50, p90, max] of the server's side: parts of the event log, else means of /metrics; then counts."""
    events, metrics = found.get("events"), found.get("metrics", {})
    rows = []
    if events is not None:
        for key, label in (PARTS | AROUND).items():
            rows.append([f"{label}, ms", *(number(events[key][name]) for name in ("mean", "p50", "p90", "max"))])
        return rows + [[label, str(events[key]), "", "", ""] for key, label in COUNTS.items()]
    for part in ("queue", "prefill", "decode"):
        mean = metrics.get(f"mean_request_{part}_seconds")
        if mean is not None:
            rows.append([f"{part}, ms", number(mean * 1e3), "", "", ""])
    counts = {"preemptions_total": "preemptions", "prefix_cache_hits_total": "prompt tokens from the cache"}
    return rows + [[label, f"{metrics[key]:.0f}", "", "", ""] for key, label in counts.items() if key in metrics]


def _server(found: dict[str, Any]) -> list[Part]:
    """Where the time went inside our own server."""
    rows = server_rows(found)
    return [Grid(["", "mean", "p50", "p90", "max"], rows, "Inside the server")] if rows else []


def _targets(summary: Mapping[str, Any]) -> Iterator[Text]:
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


def _problems(summary: Mapping[str, Any]) -> Iterator[Text]:
    if not summary["client"]["valid"]:
        yield Text(f"INVALID: {summary['client']['reason']}", "bad")
    for kind, count in summary["failures"].items():
        yield Text(f"failed, {kind}: {count} ({summary['failure_messages'][kind]})", "bad")
    for warning in summary["warnings"]:
        yield Text(f"warning: {warning}", "warn")


def _self_test(found: Mapping[str, float] | None) -> Iterator[Text]:
    """What the client itself can do here."""
    if found is not None:
        yield Text(
            f"this client: at least {found['ceiling']:,.0f} chunks/s; adds {found['added_p50_ms']:.2f} ms p50, "
            f"{found['added_p99_ms']:.2f} ms p99 to the time to first token at 200 requests/s"
        )


def number(value: float | None) -> str:
    """For people: two decimals below 1000, none above, a dash for nothing."""
    return "-" if value is None else f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"
