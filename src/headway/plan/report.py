"""Files from answers: CSV rows, PNG or SVG plots, and one HTML page that opens offline with everything inside."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.core.errors import BadInput
from headway.plan import render

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headway.roofline.probe import Knee

Answer = dict[str, Any]
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1a1a1a}
table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .7rem;border-bottom:1px solid #ddd;text-align:right;vertical-align:top}
th:first-child,td:first-child{text-align:left} pre{background:#f6f6f6;padding:.8rem;overflow-x:auto}
.kind{font-weight:600} svg{max-width:100%;height:auto}
"""


def write_csv(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Rows as CSV; nested values are written as `key=value` pairs."""
    if not rows:
        raise BadInput("--csv", "the answer has no rows to write")
    with _open(path, "--csv") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        for row in rows:
            writer.writerow({key: _flat(value) for key, value in row.items()})


def _flat(value: Any) -> Any:
    if isinstance(value, Mapping):
        return "; ".join(f"{key}={inner}" for key, inner in value.items())
    return "; ".join(map(str, value)) if isinstance(value, list) else value


def _open(path: Path, field: str) -> Any:
    try:
        return path.open("w", newline="")
    except OSError as error:
        raise BadInput(field, f"cannot write {path}: {error.strerror}") from None


def save_figure(figure: Figure, path: Path) -> None:
    """Write a plot; the suffix chooses PNG or SVG."""
    if path.suffix not in (".png", ".svg"):
        raise BadInput("--plot", f"{path}; accepted: a name that ends in .png or .svg")
    try:
        figure.savefig(path, dpi=150, bbox_inches="tight")
    except OSError as error:
        raise BadInput("--plot", f"cannot write {path}: {error.strerror}") from None


def new_figure() -> tuple[Figure, Any]:
    """A figure without a window or global state.

    Raises:
        BadInput: matplotlib, an extra, is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise BadInput(
            "--plot, --html", "plots need matplotlib; install it with: pip install 'headway[plots]'"
        ) from None

    figure = Figure(figsize=(7, 4.2))
    axes = figure.add_subplot()
    axes.grid(True, alpha=0.3)
    return figure, axes


def frontier_figure(answers: Sequence[Answer]) -> Figure:
    """Interactivity against throughput, one curve per answer, dotted where the batch no longer fits."""
    figure, axes = new_figure()
    for answer in answers:
        points = answer["points"]
        inside = [p for p in points if p["fits"]]
        outside = points[max(0, len(inside) - 1) :]
        label = f"{answer['model']}, {answer['gpus']} x {answer['hardware']}, context {answer['context']}"
        line = axes.plot(*_curve(inside), label=label)[0]
        axes.plot(*_curve(outside), linestyle=":", color=line.get_color())
    axes.set(xlabel="tokens/s per user", ylabel="tokens/s per GPU", title="Latency-throughput frontier (bound)")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    return figure


def _curve(points: Sequence[Mapping[str, float]]) -> tuple[list[float], list[float]]:
    return [p["tokens_per_second_per_user"] for p in points], [p["tokens_per_second_per_gpu"] for p in points]


def waterfall_figure(answer: Answer) -> Figure:
    """Seconds per term as bars, with the step's time as a line."""
    figure, axes = new_figure()
    terms = sorted(answer["terms"].items(), key=lambda item: item[1])
    axes.barh([name.replace("_", " ") for name, _ in terms], [value * 1e3 for _, value in terms])
    axes.axvline(answer["seconds"] * 1e3, color="black", linestyle="--", label=f"step, bound by {answer['binds']}")
    axes.set(xlabel="milliseconds", title=f"{answer['model']} on {answer['gpus']} x {answer['hardware']}")
    axes.legend(fontsize="small")
    return figure


def degrees_figure(answer: Answer) -> Figure:
    """The decode step by tensor-parallel degree, all-reduces apart."""
    figure, axes = new_figure()
    degrees = list(answer["seconds"])
    reduce = [answer["terms"][degree]["all_reduce"] * 1e3 for degree in degrees]
    rest = [answer["seconds"][degree] * 1e3 - part for degree, part in zip(degrees, reduce, strict=True)]
    axes.bar(degrees, rest, label="reading and arithmetic")
    axes.bar(degrees, reduce, bottom=rest, label="all-reduce")
    axes.set(xlabel="GPUs", ylabel="ms per step", title=f"{answer['model']}, batch {answer['batch']}")
    axes.legend(fontsize="small")
    return figure


def search_figure(answer: Answer) -> Figure:
    """Price of output against time per token, one dot per deployment."""
    figure, axes = new_figure()
    for row in answer["deployments"]:
        axes.scatter(row["tpot_ms"], row["usd_per_million_output"], label=f"{row['rank']}. {row['name']}")
    axes.set(xlabel="TPOT, ms", ylabel="$ per million output tokens", title="Deployments that meet the targets")
    axes.legend(fontsize="x-small")
    return figure


def svg(figure: Figure) -> str:
    """The figure as an SVG element to put into a page."""
    text = io.StringIO()
    figure.savefig(text, format="svg", bbox_inches="tight")
    content = text.getvalue()
    return content[content.index("<svg") :]


def html_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Rows as a table; `columns`: key -> heading."""
    head = "".join(f"<th>{html.escape(title)}</th>" for title in columns.values())
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_cell(row.get(key)))}</td>" for key in columns) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def page(title: str, parts: Sequence[str]) -> str:
    """One self-contained page: no script, no address outside itself."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1>{''.join(parts)}</body></html>\n"
    )


def explain_page(answer: Answer, curve: Answer) -> str:
    """The report of `plan explain`: waterfall, sensitivities, frontier."""
    changes = {
        "change": "change", "throughput": "tokens/s, relative", "batch": "batch, relative", "capacity": "sequences",
        "then_limited_by": "then limited by",
    }  # fmt: skip
    return page(f"{answer['model']} on {answer['hardware']}", [
        f"<pre>{html.escape(render.explain(answer))}</pre>",
        svg(waterfall_figure(answer)), "<h2>One change at a time</h2>", html_table(answer["sensitivities"], changes),
        "<h2>Frontier</h2>", svg(frontier_figure([curve])),
    ])  # fmt: skip


def search_page(answer: Answer) -> str:
    """The report of `plan search`: ranking, plot, flags to run, and what was rejected why."""
    columns = {
        "rank": "rank", "name": "deployment", "total_gpus": "GPUs", "ttft_ms": "TTFT, ms", "tpot_ms": "TPOT, ms",
        "goodput": "goodput, req/s", "usd_per_hour": "$/h", "usd_per_million_input": "$/M in",
        "usd_per_million_output": "$/M out", "utilisation": "utilisation", "survives_one_loss": "N+1",
        "limited_by": "limited by", "basis": "basis",
    }  # fmt: skip
    flags = "".join(
        f"<h3>{row['rank']}. {html.escape(row['name'])}</h3>"
        f"<pre>{html.escape(chr(10).join(row['flags'].values()))}</pre>"
        for row in answer["deployments"]
    )
    return page("Deployments for " + answer["model"], [
        f"<p class=kind>{html.escape(answer['kind'].capitalize())}. {html.escape(answer['basis'])}</p>",
        f"<p>{html.escape(render.traffic(answer))}</p>", html_table(answer["deployments"], columns),
        svg(search_figure(answer)) if answer["deployments"] else "", "<h2>To run them</h2>", flags,
        "<h2>Rejected</h2>", html_table(answer["rejected"], {"name": "deployment", "reason": "reason"}),
    ])  # fmt: skip


def write_page(text: str, path: Path) -> None:
    with _open(path, "--html") as file:
        file.write(text)


def knee_figure(knee: Knee) -> Figure:
    """The two branches of a linear layer's time: measured points, and the roofs that enclose them."""
    figure, axes = new_figure()
    batches = [point.batch for point in knee.points]
    axes.loglog(batches, [point.seconds * 1e3 for point in knee.points], "o-", label="measured")
    axes.loglog(batches, [knee.weight_seconds * 1e3] * len(batches), "--", label="streaming the weights")
    axes.loglog(batches, [knee.row_seconds * 1e3 * batch for batch in batches], "--", label="arithmetic")
    axes.axvline(knee.batch, color="grey", linewidth=0.8)
    axes.set(
        xlabel="batch", ylabel="ms", title=f"One {knee.width} x {knee.width} linear layer: knee at {knee.batch:.0f}"
    )
    axes.legend(fontsize="small")
    return figure
