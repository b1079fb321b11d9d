"""A run written down: JSON and CSV for machines, a table for the terminal, raw records for later views."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headway.bench.load import Load, Run
from headway.bench.records import RequestRecord
from headway.bench.server import PARTS, ServerSide, side_of
from headway.core.errors import BadInput
from headway.report.files import write

SERVER_COLUMNS = ServerSide.__struct_fields__  # empty but for our own server with its event log
COLUMNS = (
    "index", "warmup", "intended_s", "sent_s", "ttft_ms", "ttfa_ms", "tpot_ms", "e2e_ms", "e2e_done_ms",
    "prompt_wanted", "prompt_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "chunks", "finish_reason",
    "status", "failure", "message", "server_id", *SERVER_COLUMNS,
)  # fmt: skip
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


def to_json(summary: dict[str, Any]) -> str:
    """One JSON object; numbers that are not finite would not be JSON and are refused."""
    return msgspec.json.format(msgspec.json.encode(_finite(summary)), indent=2).decode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a metric is not a finite number")
    return value


def to_csv(records: Sequence[RequestRecord], sides: Mapping[str, ServerSide] | None = None) -> str:
    """One row per request; seconds count from the first intended start. `sides`: the server's event log."""
    start = min((record.intended for record in records if record.sent), default=0)
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(COLUMNS)
    for r in records:
        failure, message = (r.failure.kind.value, r.failure.message) if r.failure else ("", "")
        side = side_of(r, sides or {})
        server = [getattr(side, name) for name in SERVER_COLUMNS] if side else [None] * len(SERVER_COLUMNS)
        since = [(at - start) / 1e9 if at and start else "" for at in (r.intended, r.sent)]
        writer.writerow(
            [r.index, int(r.warmup), *since, r.ttft_ms, r.ttfa_ms, r.tpot_ms, r.e2e_ms, r.e2e_done_ms,
             r.prompt_wanted, r.prompt_tokens, r.cached_tokens, r.output_tokens, r.reasoning_tokens,
             len(r.token_events()), r.finish_reason, r.status, failure, message, r.server_id, *server]
        )  # fmt: skip
    return out.getvalue()


class Saved(msgspec.Struct):
    """A run on disk: what `headway bench view` reads."""

    api: str
    load_kind: str
    rate: float
    records: list[RequestRecord]


def save_records(path: Path, run: Run, api: str) -> None:
    write(path, "--records", msgspec.json.encode(Saved(api, run.load.kind, run.load.rate, run.records)).decode())


def load_records(path: Path) -> tuple[Run, str]:
    """The run and its API.

    Raises:
        BadInput: no such file, or it is not one of these.
    """
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=Saved)
    except OSError as error:
        raise BadInput("RECORDS", f"cannot read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise BadInput("RECORDS", f"{path} was not written by `headway bench --records`: {error}") from None
    return Run(Load(saved.load_kind, saved.rate, saved.rate), saved.records), saved.api


def table(summary: dict[str, Any]) -> RenderableType:
    """The run for a terminal."""
    requests, throughput = summary["requests"], summary["throughput"]
    where = f"{summary['model']} at {summary['url']} ({summary['api']})"
    head = f"{where}: {requests['completed']} of {requests['total']} completed"
    grid = Table(title=head, title_justify="left", caption=summary["percentiles"]["method"], caption_justify="left")
    for name in ("ms", "mean", "p50", "p90", "p95", "p99", "n"):
        grid.add_column(name, justify="left" if name == "ms" else "right")
    for key, label in LATENCIES.items():
        stat = summary[key]
        grid.add_row(label, *(number(stat[name]) for name in ("mean", "p50", "p90", "p95", "p99")), str(stat["n"]))
    lines: list[RenderableType] = [grid]
    lines += [
        Text(f"throughput: {number(throughput['output'])} output, {number(throughput['input'])} input, "
             f"{number(throughput['total'])} total tokens/s; {number(throughput['requests'])} requests/s"),
        Text(f"cached prompt tokens: {number(summary['cached_tokens']['total'])}; seed: {summary['workload']['seed']}"),
    ]  # fmt: skip
    for kind, count in summary["failures"].items():
        lines.append(Text(f"failed, {kind}: {count} ({summary['failure_messages'][kind]})", style="red"))
    if prediction := summary.get("prediction"):
        lines += _prediction(prediction)
    lines += _server(summary.get("server", {}))
    if "slo" in summary:
        slo = summary["slo"]
        low, high = slo["ci95"]
        share = "no request" if slo["attainment"] is None else f"{slo['attainment']:.1%}"
        lines.append(
            Text(
                f"targets met by {share} (95 % interval {low:.1%} to {high:.1%}), wanted {slo['attainment_target']:.0%}"
            )
        )
    if "goodput" in summary:
        good = summary["goodput"]
        lines.append(
            Text(f"goodput: {number(good['rate'])} requests/s" + (f" ({good['reason']})" if good["reason"] else ""))
        )
    lines += [Text(f"warning: {warning}", style="yellow") for warning in summary["warnings"]]
    lines += _client(summary["client"])
    return Group(*lines)


def _client(client: dict[str, Any]) -> list[RenderableType]:
    """What the client itself can do here, and whether that was enough."""
    lines: list[RenderableType] = []
    if client["self_test"] is not None:
        test = client["self_test"]
        lines.append(
            Text(f"this client: at least {test['ceiling']:,.0f} chunks/s; adds {test['added_p50_ms']:.2f} ms p50, "
                 f"{test['added_p99_ms']:.2f} ms p99 to the time to first token at 200 requests/s")
        )  # fmt: skip
    if not client["valid"]:
        lines.append(Text(f"INVALID: {client['reason']}", style="bold red"))
    return lines


def _prediction(found: dict[str, Any]) -> list[RenderableType]:
    """Measured beside predicted, with the terms of the prediction."""
    if "metrics" not in found:
        return [Text(f"no prediction: {found['reason']}", style="yellow")]
    where = f"{found['model']} on {found['gpus']} x {found['hardware']}"
    grid = Table(title=f"Beside the {found['kind']} of {where}, batch {found['batch']:.1f}", title_justify="left")
    for name in ("ms", "measured p50", found["kind"], "range", "ratio", "terms"):
        grid.add_column(name, justify="left" if name in ("ms", "terms") else "right")
    for key, row in found["metrics"].items():
        terms = sorted(row["terms"].items(), key=lambda term: -term[1])
        waterfall = ", ".join(f"{name} {number(value)}" for name, value in terms[:4])
        ratio = row["measured_over_predicted"]
        span = "-" if row["range"] is None else f"{number(row['range'][0])} to {number(row['range'][1])}"
        grid.add_row(LATENCIES[key], number(row["measured"]), number(row["predicted"]), span, number(ratio), waterfall)
    shares = [f"{name} {found[key]:.1%}" for key, name in (("mbu", "MBU"), ("mfu", "MFU")) if found[key] is not None]
    lines: list[RenderableType] = [grid, Text(", ".join(shares))]
    if found["reason"]:
        lines.append(Text(found["reason"], style="bold red"))
    return lines


def server_rows(found: dict[str, Any]) -> list[list[str]]:
    """[what, mean, p50, p90, max] of the server's side: parts of the event log, else means of /metrics; then counts."""
    events, metrics = found.get("events"), found.get("metrics", {})
    rows = []
    if events is not None:
        labels = PARTS | {"outside_ms": "outside, to the first token", "unaccounted_ms": "outside, in all"}
        for key, label in labels.items():
            stat = events[key]
            rows.append([f"{label}, ms", *(number(stat[name]) for name in ("mean", "p50", "p90", "max"))])
        for key, label in COUNTS.items():
            rows.append([label, str(events[key]), "", "", ""])
        return rows
    for part in ("queue", "prefill", "decode"):
        mean = metrics.get(f"mean_request_{part}_seconds")
        if mean is not None:
            rows.append([f"{part}, ms", number(mean * 1e3), "", "", ""])
    if "preemptions_total" in metrics:
        rows.append(["preemptions", f"{metrics['preemptions_total']:.0f}", "", "", ""])
    if "prefix_cache_hits_total" in metrics:
        rows.append(["prompt tokens from the cache", f"{metrics['prefix_cache_hits_total']:.0f}", "", "", ""])
    return rows


def _server(found: dict[str, Any]) -> list[RenderableType]:
    """Where the time went inside our own server."""
    rows = server_rows(found)
    if not rows:
        return []
    grid = Table(title="Inside the server", title_justify="left")
    for name in ("", "mean", "p50", "p90", "max"):
        grid.add_column(name, justify="right" if name else "left")
    for row in rows:
        grid.add_row(*row)
    return [grid]


def number(value: float | None) -> str:
    """For people: two decimals below 1000, none above, a dash for nothing."""
    return "-" if value is None else f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"
