"""A run as one HTML file that opens offline: the summary's tables and plots as inline SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.bench.load import Run
from headway.bench.records import NS_PER_MS, NS_PER_S, TOKEN_KINDS, RequestRecord
from headway.bench.report import LATENCIES, number, server_rows, to_json
from headway.bench.server import SPLIT
from headway.report.figures import new_figure, svg
from headway.report.page import details, heading, page, paragraph, table

MAX_LANES = 400  # requests drawn in a timeline
COLOURS = ("#c9ced6", "#9db8d9", "#2b6cb0", "#d9a441", "#b3261e")  # of the server's parts, in SPLIT's order
Draw = Callable[[Any], None]  # onto axes


def run_page(summary: dict[str, Any], run: Run) -> str:
    """The whole page."""
    records = [record for record in run.records if record.sent]
    notes = [paragraph(f"Warning: {text}", "warn") for text in summary["warnings"]]
    if not summary["client"]["valid"]:
        notes.insert(0, paragraph(f"INVALID: {summary['client']['reason']}", "bad"))
    for kind, count in summary["failures"].items():
        notes.append(paragraph(f"{count} failed, {kind}: {summary['failure_messages'][kind]}", "bad"))
    prediction = summary.get("prediction", {})
    return page(f"{summary['model']} at {summary['url']}", [
        *notes, *_latencies(summary), _throughput(summary), *_prediction(prediction),
        *map(_figure, plots_of(records, prediction.get("metrics", {}))), *_server(summary.get("server", {}), records),
        details("All numbers", to_json(summary)),
    ])  # fmt: skip


def plots_of(records: Sequence[RequestRecord], predicted: dict[str, Any]) -> list[Draw]:
    """Distributions of TTFT and TPOT (with the prediction), requests and chunks over time."""
    if not records:
        return []
    drawn = [
        _distribution(records, name, label, predicted)
        for name, label in (("ttft_ms", "time to first token, ms"), ("tpot_ms", "time per output token, ms"))
        if any(getattr(record, name) is not None for record in records)
    ]
    return [*drawn, _timeline(records), _chunks(records)]


def _distribution(records: Sequence[RequestRecord], name: str, label: str, predicted: Mapping[str, Any]) -> Draw:
    def draw(axes: Any) -> None:
        values = sorted(value for record in records if (value := getattr(record, name)) is not None)
        axes.step(values, [(index + 1) / len(values) for index in range(len(values))], where="post")
        if name in predicted:
            axes.axvline(predicted[name]["predicted"], color="#b3261e", linestyle="--", label="predicted")
            axes.legend()
        axes.set(xlabel=label, ylabel="share of requests", ylim=(0, 1.02), title=f"Distribution of {label}")

    return draw


def _timeline(records: Sequence[RequestRecord]) -> Draw:
    start = min(record.intended for record in records)

    def draw(axes: Any) -> None:
        for lane, record in enumerate(records[:MAX_LANES]):
            first, last = record.first(TOKEN_KINDS), record.last(TOKEN_KINDS)
            at = (record.intended - start) / NS_PER_S
            if first is None or last is None:
                axes.plot(at, lane, "x", color="#b3261e", markersize=4)
                continue
            axes.barh(lane, (first - record.intended) / NS_PER_S, left=at, color="#9db8d9", height=0.8)
            axes.barh(lane, (last - first) / NS_PER_S, left=(first - start) / NS_PER_S, color="#2b6cb0", height=0.8)
        title = "Requests: waiting for the first token (pale), streaming (dark)"
        axes.set(xlabel="seconds", ylabel="request", title=title)

    return draw


def _chunks(records: Sequence[RequestRecord]) -> Draw:
    start = min(record.intended for record in records)

    def draw(axes: Any) -> None:
        times = [(at - start) / NS_PER_S for record in records for at, _ in record.token_events()]
        axes.hist(times, bins=60, color="#2b6cb0")
        axes.set(xlabel="seconds", ylabel="chunks received", title="Chunks over time")

    return draw


def _figure(draw: Draw) -> str:
    figure, axes = new_figure("--html", 9, 3.6)
    draw(axes)
    return svg(figure)


def _latencies(summary: dict[str, Any]) -> list[str]:
    names = ("mean", "p50", "p90", "p95", "p99")
    rows = []
    for key, label in LATENCIES.items():
        stat = summary[key]
        rows.append([f"{label}, ms", *(number(stat[name]) + _interval(stat, name) for name in names), stat["n"],
                     stat["reason"] or ""])  # fmt: skip
    method = f"Percentiles: {summary['percentiles']['method']}; 95 % order-statistic intervals in brackets."
    return [table(["", *names, "samples", "why not all"], rows), paragraph(method)]


def _throughput(summary: dict[str, Any]) -> str:
    rates = summary["throughput"]
    rows = {f"{name} tokens/s": rates[name] for name in ("output", "input", "total")}
    rows |= {"requests/s": rates["requests"], "cached prompt tokens": summary["cached_tokens"]["total"]}
    if "slo" in summary:
        rows["share that met all targets"] = summary["slo"]["attainment"]
    if "goodput" in summary:
        rows["goodput, requests/s"] = summary["goodput"]["rate"]
    return table(["", ""], [[name, number(value)] for name, value in rows.items()])


def _prediction(found: dict[str, Any]) -> list[str]:
    """Measured beside the step-time model's prediction and bound, with the terms of the prediction."""
    if "metrics" not in found:
        return [paragraph(f"No prediction: {found['reason']}", "warn")] if found else []
    rows = []
    for key, row in found["metrics"].items():
        terms = ", ".join(f"{name} {value:.2f}" for name, value in row["terms"].items())
        figures = (number(row[name]) for name in ("measured", "predicted", "bound", "unexplained"))
        rows.append([LATENCIES[key], *figures, terms])
    note = f"{found['model']} on {found['gpus']} x {found['hardware']}, batch {found['batch']:.1f}. {found['label']}."
    shares = f"MBU {number(found['mbu'])}, MFU {number(found['mfu'])}. {found['reason'] or ''}"
    head = ["ms", "measured p50", found["kind"], "bound", "unexplained", "terms"]
    return [heading("Prediction"), table(head, rows), paragraph(f"{note} {shares}")]


def _server(found: dict[str, Any], records: Sequence[RequestRecord]) -> list[str]:
    """Where the time went inside our own server: its parts in all, and request by request."""
    rows = server_rows(found)
    if not rows:
        return []
    parts = [heading("Inside the server"), table(["", "mean", "p50", "p90", "max"], rows)]
    split = found.get("events", {}).get("requests", {})
    if split:
        parts.append(_figure(_splits(split, records)))
    return parts


def _splits(split: Mapping[str, Mapping[str, Any]], records: Sequence[RequestRecord]) -> Draw:
    """A lane per request: its parts one after the other, and a dot where the client had the last token."""

    def draw(axes: Any) -> None:
        lanes = [(r, split[str(r.index)]) for r in records if str(r.index) in split][:MAX_LANES]
        starts = [0.0] * len(lanes)
        for (part, label), colour in zip(SPLIT.items(), COLOURS, strict=True):
            widths = [(row[part] or 0.0) / 1e3 for _, row in lanes]
            axes.barh(range(len(lanes)), widths, left=starts, color=colour, height=0.8, label=label)
            starts = [left + width for left, width in zip(starts, widths, strict=True)]
        ends = [(end - r.intended) / NS_PER_MS / 1e3 if (end := r.last(TOKEN_KINDS)) else None for r, _ in lanes]
        seen = [(end, lane) for lane, end in enumerate(ends) if end is not None]
        axes.plot([end for end, _ in seen], [lane for _, lane in seen], "k.", markersize=3, label="client: last token")
        axes.legend(fontsize="small")
        axes.set(xlabel="seconds since the intended start", ylabel="request", title="What each request waited for")

    return draw


def _interval(stat: dict[str, Any], name: str) -> str:
    bounds = stat.get("ci95", {}).get(name)
    return f" [{bounds[0]:.1f}, {bounds[1]:.1f}]" if bounds else ""
