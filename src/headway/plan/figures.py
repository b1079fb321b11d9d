"""Plots of the planner's answers, each drawn onto given matplotlib axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.plan.answers import Frontier, Step, TensorParallel
from headway.plan.answers_lists import Audit, Search
from headway.report.figures import LIMIT
from headway.roofline.frontier import FrontierPoint


def frontier(axes: Any, answer: Frontier) -> None:
    """Interactivity against throughput, dotted where the batch no longer fits; the knee is marked."""
    inside = [point for point in answer.points if point.fits]
    outside = answer.points[max(0, len(inside) - 1) :]
    label = f"{answer.model}, {answer.gpus} x {answer.hardware}, context {answer.context}"
    line = axes.plot(*_curve(inside), label=label)[0]
    if len(outside) > 1:
        dotted = f"dotted: more than the {answer.fits_batch} sequences that memory holds"
        axes.plot(*_curve(outside), linestyle=":", color=line.get_color(), label=dotted)
    if answer.ceiling:
        axes.axhline(answer.ceiling, color="grey", linewidth=0.8, linestyle="--", label="ceiling of any batch")
    knee = next((point for point in answer.points if answer.knee and point.batch >= round(answer.knee)), None)
    if knee is not None:
        at = f"knee: at batch {answer.knee:.0f} arithmetic takes as long as reading the weights"
        axes.plot(*_curve([knee]), "o", color=LIMIT, label=at)
    axes.set(
        xlabel="tokens/s per user", ylabel="tokens/s per GPU", title=f"Latency-throughput frontier ({answer.kind})"
    )
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False)


def _curve(points: Sequence[FrontierPoint]) -> tuple[list[float], list[float]]:
    return [p.tokens_per_second_per_user for p in points], [p.tokens_per_second_per_gpu for p in points]


def waterfall(axes: Any, answer: Step) -> None:
    """Seconds per term as bars, with the step's time as a line."""
    terms = sorted(((value, name) for name, value in answer.terms.items() if value))
    axes.barh([name.replace("_", " ") for _, name in terms], [value * 1e3 for value, _ in terms])
    axes.axvline(answer.seconds * 1e3, color="black", linestyle="--", label=f"the step, bound by {answer.binds}")
    axes.set(xlabel="milliseconds", title=f"{answer.model} on {answer.gpus} x {answer.hardware}")
    axes.legend(fontsize="small")


def degrees(axes: Any, answer: TensorParallel) -> None:
    """The decode step by tensor-parallel degree, all-reduces apart."""
    names = [str(degree) for degree in answer.seconds]
    reduce = [terms["all_reduce"] * 1e3 for terms in answer.terms.values()]
    rest = [seconds * 1e3 - part for seconds, part in zip(answer.seconds.values(), reduce, strict=True)]
    axes.bar(names, rest, label="reading and arithmetic")
    axes.bar(names, reduce, bottom=rest, label="all-reduce")
    axes.set(xlabel="GPUs", ylabel="ms per step", title=f"{answer.model}, batch {answer.batch}")
    axes.legend(fontsize="small")


def audit(axes: Any, answer: Audit) -> None:
    """Speeds claimed beyond a device, and the nearest possible ones."""
    beyond = [claim for claim in answer.claims if claim.possible][:30]
    names = [f"line {claim.row}: {claim.model} on {claim.hardware}" for claim in beyond]
    axes.hlines(names, *([getattr(claim, end) for claim in beyond] for end in ("possible", "claimed")), color="grey")
    axes.plot([claim.possible for claim in beyond], names, "o", label="the most that is possible")
    axes.plot([claim.claimed for claim in beyond], names, "o", label="claimed", color=LIMIT)
    axes.margins(y=0.2)
    axes.set(xlabel="tokens/s", xscale="log", title="Claims beyond their devices")
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False)


def search(axes: Any, answer: Search) -> None:
    """Price of output against time per token, one dot per deployment with its rank: colours come again."""
    for row in answer.deployments:
        at = row.tpot_ms, row.usd_per_million_output
        axes.scatter(*at, label=f"{row.rank}. {row.name}")
        axes.annotate(str(row.rank), at, (4, 4), textcoords="offset points", fontsize="small")
    axes.set(xlabel="TPOT, ms", ylabel="$ per million output tokens", title="Deployments that meet the targets")
    axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False)
