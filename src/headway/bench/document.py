"""A run for people, put together once: the terminal shows the tables, the page the plots and all numbers as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from headway.bench.figures import splits
from headway.bench.server import AROUND, PARTS
from headway.metrics.document import LATENCIES, intervals, latencies, number, rates, targets
from headway.metrics.figures import plots_of
from headway.metrics.files import to_json
from headway.metrics.run import Run
from headway.report.document import Document, Drawing, Folded, Grid, Listing, Part, Text
from headway.report.units import of_devices

COUNTS = {  # of the server's event log
    "cached": "prompt tokens from the cache", "recomputed": "tokens computed again after preemptions",
    "preemptions": "preemptions",
}  # fmt: skip


def document(summary: dict[str, Any], run: Run) -> Document:
    """What was measured, what failed, and whether the client was the bottleneck."""
    records = [record for record in run.records if record.sent]
    requests, prediction, server = summary["requests"], summary.get("prediction"), summary.get("server", {})
    where = f"{summary['model']} at {summary['url']} ({summary['api']})"
    waits = server.get("events", {}).get("requests", {})
    return Document(f"{where}: {requests['completed']} of {requests['total']} completed", [
        *_problems(summary), latencies(summary), Text(summary["percentiles"]["method"], "note"),
        *rates(summary), *(_prediction(prediction) if prediction else []), *_server(server), *targets(summary),
        *_self_test(summary["client"]["self_test"]),
    ], [
        intervals(summary), *map(Drawing, plots_of(records, (prediction or {}).get("metrics", {}))),
        *([Drawing(splits(waits, records))] if waits else []), Folded("All numbers", to_json(summary)),
    ])  # fmt: skip


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
    where = f"{found['model']} on {of_devices(found['hardware'], found['gpus'])}"
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
    head, rows = ["", "mean", "p50", "p90", "max"], server_rows(found)
    used = max((len([cell for cell in row if cell]) for row in rows), default=0)  # /metrics knows means only
    return [Grid(head[:used], [row[:used] for row in rows], "Inside the server")] if rows else []


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
