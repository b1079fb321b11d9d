"""Files, plots and pages of the planner's answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.plan import render
from headway.report.figures import new_figure, save_figure, svg
from headway.report.files import write, write_csv
from headway.report.page import heading, page, paragraph, preformatted, table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from headway.measure.probe import Knee

Answer = dict[str, Any]


def write_files(
    answer: Answer, *, csv: Path | None = None, rows: str = "",
    plot: Path | None = None, figure: Callable[[Answer], Figure] | None = None,
    html: Path | None = None, page: Callable[[Answer], str] | None = None,
) -> None:  # fmt: skip
    """Write what was asked for: the answer's `rows`, its `figure`, its `page`."""
    if csv is not None:
        write_csv(answer[rows], csv)
    if plot is not None and figure is not None:
        save_figure(figure(answer), plot)
    if html is not None and page is not None:
        write(html, "--html", page(answer))


def frontier_figure(*answers: Answer) -> Figure:
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


def explain_page(answer: Answer) -> str:
    """The report of `plan explain`: waterfall, sensitivities, frontier."""
    changes = {
        "change": "change", "throughput": "tokens/s, relative", "batch": "batch, relative", "capacity": "sequences",
        "then_limited_by": "then limited by",
    }  # fmt: skip
    return page(f"{answer['model']} on {answer['hardware']}", [
        preformatted(render.explain(answer)), svg(waterfall_figure(answer)), heading("One change at a time"),
        table_of(answer["sensitivities"], changes), heading("Frontier"), svg(frontier_figure(answer["frontier"])),
    ])  # fmt: skip


def search_page(answer: Answer) -> str:
    """The report of `plan search`: ranking, plot, flags to run, and what was rejected why."""
    columns = {
        "rank": "rank", "name": "deployment", "total_gpus": "GPUs", "ttft_ms": "TTFT, ms", "tpot_ms": "TPOT, ms",
        "goodput": "goodput, req/s", "usd_per_hour": "$/h", "usd_per_million_input": "$/M in",
        "usd_per_million_output": "$/M out", "utilisation": "utilisation", "survives_one_loss": "N+1",
        "limited_by": "limited by", "basis": "basis",
    }  # fmt: skip
    flags = [
        part
        for row in answer["deployments"]
        for part in (heading(f"{row['rank']}. {row['name']}", 3), preformatted("\n".join(row["flags"].values())))
    ]
    return page("Deployments for " + answer["model"], [
        paragraph(f"{answer['kind'].capitalize()}. {answer['basis']}", "kind"), paragraph(render.traffic(answer)),
        table_of(answer["deployments"], columns), svg(search_figure(answer)) if answer["deployments"] else "",
        heading("To run them"), *flags,
        heading("Rejected"), table_of(answer["rejected"], {"name": "deployment", "reason": "reason"}),
    ])  # fmt: skip


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
