"""A run as one HTML file that opens offline: the summary's tables and plots as inline SVG, no script, no request."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from typing import Any

from headway.bench.load import Run
from headway.bench.records import NS_PER_S, TOKEN_KINDS, RequestRecord
from headway.bench.report import LATENCIES
from headway.core.errors import BadInput

MAX_LANES = 400  # requests drawn in the timeline
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1c2430}
table{border-collapse:collapse;margin:1rem 0}
td,th{padding:.25rem .8rem;text-align:right;border-bottom:1px solid #d8dee6}
td:first-child,th:first-child{text-align:left}
.bad{color:#b3261e;font-weight:600}.warn{color:#8a5a00}
svg{max-width:100%;height:auto}
pre{background:#f4f6f8;padding:1rem;overflow:auto}
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def need_plots(option: str) -> None:
    """Raises BadInput that names `option` where matplotlib is not installed, before a run is spent."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BadInput(option, "plots need matplotlib; install it with: pip install 'headway[plots]'") from None


def page(summary: dict[str, Any], run: Run) -> str:
    """The whole page."""
    from headway.bench.report import to_json

    records = [record for record in run.records if record.sent]
    title = f"{summary['model']} at {summary['url']}"
    notes = [f'<p class="warn">Warning: {_safe(text)}</p>' for text in summary["warnings"]]
    if not summary["client"]["valid"]:
        notes.insert(0, f'<p class="bad">INVALID: {_safe(summary["client"]["reason"])}</p>')
    notes += [
        f'<p class="bad">{count} failed, {_safe(kind)}: {_safe(summary["failure_messages"][kind])}</p>'
        for kind, count in summary["failures"].items()
    ]
    prediction = summary.get("prediction", {})
    plots = [_svg(draw) for draw in plots_of(records, prediction.get("metrics", {}))]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f"<title>{_safe(title)}</title><style>{STYLE}</style></head><body><h1>{_safe(title)}</h1>",
            *notes,
            _latency_table(summary),
            _throughput_table(summary),
            _prediction_table(prediction),
            *plots,
            f"<details><summary>All numbers</summary><pre>{_safe(to_json(summary))}</pre></details>",
            "</body></html>",
        ]
    )


def plots_of(records: Sequence[RequestRecord], predicted: dict[str, Any]) -> list[Any]:
    """Functions that draw on axes: distributions of TTFT and TPOT (with the predicted bound), requests and chunks over
    time."""

    def distribution(name: str, label: str) -> Any:
        def draw(axes: Any) -> None:
            values = sorted(value for record in records if (value := getattr(record, name)) is not None)
            shares = [(index + 1) / len(values) for index in range(len(values))]
            axes.step(values, shares, where="post")
            if name in predicted:
                axes.axvline(predicted[name]["predicted"], color="#b3261e", linestyle="--", label="bound")
                axes.legend()
            axes.set(xlabel=label, ylabel="share of requests", ylim=(0, 1.02), title=f"Distribution of {label}")

        return draw

    start = min((record.intended for record in records), default=0)

    def timeline(axes: Any) -> None:
        for lane, record in enumerate(records[:MAX_LANES]):
            first, last = record.first(TOKEN_KINDS), record.last(TOKEN_KINDS)
            at = (record.intended - start) / NS_PER_S
            if first is None or last is None:
                axes.plot(at, lane, "x", color="#b3261e", markersize=4)
                continue
            axes.barh(lane, (first - record.intended) / NS_PER_S, left=at, color="#9db8d9", height=0.8)
            axes.barh(lane, (last - first) / NS_PER_S, left=(first - start) / NS_PER_S, color="#2b6cb0", height=0.8)
        axes.set(
            xlabel="seconds", ylabel="request", title="Requests: waiting for the first token (pale), streaming (dark)"
        )

    def tokens(axes: Any) -> None:
        times = [(at - start) / NS_PER_S for record in records for at, _ in record.token_events()]
        axes.hist(times, bins=60, color="#2b6cb0")
        axes.set(xlabel="seconds", ylabel="chunks received", title="Chunks over time")

    drawn: list[Any] = [timeline, tokens]
    if any(record.tpot_ms is not None for record in records):
        drawn.insert(0, distribution("tpot_ms", "time per output token, ms"))
    if any(record.ttft_ms is not None for record in records):
        drawn.insert(0, distribution("ttft_ms", "time to first token, ms"))
    return drawn if records else []


def _svg(draw: Any) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    draw(figure.add_subplot())
    out = io.StringIO()
    figure.savefig(out, format="svg")
    return out.getvalue()[out.getvalue().index("<svg") :]


def _latency_table(summary: dict[str, Any]) -> str:
    names = ("mean", "p50", "p90", "p95", "p99")
    rows = []
    for key, label in LATENCIES.items():
        stat = summary[key]
        cells = "".join(f"<td>{_number(stat[name])}{_interval(stat, name)}</td>" for name in names)
        reason = f' title="{_safe(stat["reason"])}"' if stat["reason"] else ""
        rows.append(f"<tr{reason}><td>{label}, ms</td>{cells}<td>{stat['n']}</td></tr>")
    head = "".join(f"<th>{name}</th>" for name in ("", *names, "samples"))
    method = f"Percentiles: {summary['percentiles']['method']}; 95 % order-statistic intervals in brackets."
    return f"<table><tr>{head}</tr>{''.join(rows)}</table><p>{_safe(method)}</p>"


def _throughput_table(summary: dict[str, Any]) -> str:
    rates = summary["throughput"]
    rows = {f"{name} tokens/s": rates[name] for name in ("output", "input", "total")}
    rows |= {"requests/s": rates["requests"], "cached prompt tokens": summary["cached_tokens"]["total"]}
    if "slo" in summary:
        rows["share that met all targets"] = summary["slo"]["attainment"]
    if "goodput" in summary:
        rows["goodput, requests/s"] = summary["goodput"]["rate"]
    return (
        "<table>"
        + "".join(f"<tr><td>{name}</td><td>{_number(value)}</td></tr>" for name, value in rows.items())
        + "</table>"
    )


def _prediction_table(found: dict[str, Any]) -> str:
    """Measured beside the step-time model's bound, with the terms of the bound."""
    if "metrics" not in found:
        return f'<p class="warn">No prediction: {_safe(found["reason"])}</p>' if found else ""
    head = "".join(f"<th>{name}</th>" for name in ("ms", "measured p50", "bound", "unexplained", "terms of the bound"))
    rows = []
    for key, row in found["metrics"].items():
        terms = ", ".join(f"{_safe(name)} {value:.2f}" for name, value in row["terms"].items())
        cells = "".join(f"<td>{_number(row[name])}</td>" for name in ("measured", "predicted", "unexplained"))
        rows.append(f"<tr><td>{LATENCIES[key]}</td>{cells}<td>{terms}</td></tr>")
    note = f"{found['model']} on {found['gpus']} x {found['hardware']}, batch {found['batch']:.1f}. {found['label']}."
    shares = f"MBU {_number(found['mbu'])}, MFU {_number(found['mfu'])}. {found['reason'] or ''}"
    return f"<h2>Prediction</h2><table><tr>{head}</tr>{''.join(rows)}</table><p>{_safe(note)} {_safe(shares)}</p>"


def _interval(stat: dict[str, Any], name: str) -> str:
    bounds = stat.get("ci95", {}).get(name)
    return f" [{bounds[0]:.1f}, {bounds[1]:.1f}]" if bounds else ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _safe(text: str) -> str:
    return html.escape(str(text))
