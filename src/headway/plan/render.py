"""How the verbs about steps are shown; the other files `render_*.py` are brought along."""

from __future__ import annotations

from functools import partial

from headway.plan import figures, render_lists, render_prices, render_search
from headway.plan.answers import Capacity, Explained, Frontier, Prefill, Served, Step, TensorParallel
from headway.plan.parts import document, parts, spread, waterfall
from headway.report.document import Drawing, Grid, Listing, Part, Text
from headway.report.units import count, decimal, gigabytes, seconds, times, yes

__all__ = ["document", "render_lists", "render_prices", "render_search"]


@parts.register
def _(a: Step) -> list[Part]:
    beside = f", {a.chunk} prompt tokens beside" if a.chunk else ""
    what = f"decode step, batch {a.batch}, context {a.context}{beside}"
    lines: list[Part] = []
    if not a.fits:
        lines.append(Text(f"does not fit: {_needs(a.gpus_needed)}", "bad"))
        what = f"if it did, a {what}"
    lines.append(Text(f"{what}: {seconds(a.seconds)}{spread(a.range)}, bound by {a.binds}"))
    each = f", {decimal(a.tokens_per_second_per_user)} tok/s per user" if a.batch > 1 else ""
    lines += [
        Text(f"{decimal(a.tokens_per_second)} tok/s{each}"),
        waterfall(a.terms, a.seconds), Drawing(partial(figures.waterfall, answer=a), on_page=False),
    ]  # fmt: skip
    return lines


def _needs(gpus: int | None) -> str:
    return f"needs {gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "no number of these GPUs holds it"


@parts.register
def _(a: Prefill) -> list[Part]:
    cached = f" ({a.cached_tokens} cached)" if a.cached_tokens else ""
    rate = "" if a.mfu is None else f" at {a.mfu:.0%} MFU"
    what = f"prefill of {a.input_tokens} tokens{cached}{rate}: {seconds(a.seconds)}{spread(a.range)}"
    lines: list[Part] = [
        Text(f"{what}, {count(a.tokens_per_second)} tok/s, bound by {a.binds}"),
        waterfall(a.terms, a.seconds),
    ]
    if a.attention_overtakes is not None:
        lines.append(
            Text(f"prompts from {count(a.attention_overtakes)} tokens on are more work in attention than in matrices")
        )
    return lines


@parts.register
def _(a: Frontier) -> list[Part]:
    marks = [f"{a.fits_batch} sequences fit in memory"]
    if a.knee is not None:
        marks.append(f"knee at batch {count(a.knee)}: arithmetic takes as long as reading the weights")
    if a.critical_context is not None:
        marks.append(f"critical context {count(a.critical_context)} tokens: beyond it no batch is compute-bound")
    if a.ceiling is not None:
        marks.append(f"ceiling {count(a.ceiling)} tok/s per GPU: no batch exceeds it")
    rows = [
        [str(p.batch), seconds(p.seconds), decimal(p.tokens_per_second_per_user), count(p.tokens_per_second_per_gpu),
         p.binds, yes(p.fits)]
        for p in a.points
    ]  # fmt: skip
    return [
        Listing(f"context {a.context}", marks),
        Grid(["batch", "step", "tok/s/user", "tok/s/GPU", "bound by", "fits"], rows),
        *_estimated(a),
        Drawing(partial(figures.frontier, answer=a)),
    ]  # fmt: skip


def _estimated(a: Frontier) -> list[Part]:
    """What an engine's requests see at these loads."""
    if not a.served:
        return [Text(f"no estimate of served requests: {a.abstained}", "note")]
    rows = [
        [f"{p.load:g}", seconds(p.ttft.p50), decimal(1 / p.tpot.p50), f"{decimal(1 / p.tpot.p90)} to "
         f"{decimal(1 / p.tpot.p10)}", count(p.requests_per_second.p50 * p.output_tokens / (a.gpus or 1))]
        for p in a.served
    ]  # fmt: skip
    head = ["in flight", "TTFT", "tok/s/user", "p10 to p90", "tok/s/GPU"]
    return [Grid(head, rows, f"Served, estimate: {a.served[0].output_tokens:g} tokens out per request")]


@parts.register
def _(a: Capacity) -> list[Part]:
    limits = {f"reading within {a.tpot_ms or 0:g} ms (tpot-memory)": a.tpot_memory_batch,
              f"arithmetic within {a.tpot_ms or 0:g} ms (tpot-compute)": a.tpot_compute_batch}  # fmt: skip
    rows = [["memory", count(a.memory_batch)], *([k, count(v)] for k, v in limits.items() if v is not None)]
    if not a.memory_batch:
        return [Text(f"nothing fits, not even one sequence of {a.context} tokens: {_needs(a.gpus_needed)}", "bad")]
    because = "" if a.batch else f" ({a.because})"
    speed = f": {seconds(a.seconds)} per step, {count(a.tokens_per_second)} tok/s" if a.batch else ""
    return [
        Text(f"{a.batch} sequences of {a.context} tokens, limited by {a.limited_by}{because}{speed}"),
        Grid(["limit", "sequences"], rows),
        Text(f"{gigabytes(a.free_bytes)} left for the cache, {gigabytes(a.bytes_per_sequence)} per sequence"),
        *_served_within(a),
    ]


def _served_within(a: Capacity) -> list[Part]:
    """As many as an engine serves within the promise."""
    if a.abstained:
        return [Text(f"no estimate of served requests: {a.abstained}", "note")]
    if a.served is None:
        return [Text(f"served, estimate: not even one within {a.tpot_ms or 0:g} ms", "warn")]
    sure = ""
    if a.tpot_ms:
        sure = f"; {a.surely.load:g} to be sure (p90 within it)" if a.surely else "; p90 is beyond it even for one"
    found = a.served
    return [Text(
        f"served, estimate: {found.load:g} in flight at {seconds(found.tpot.p50)} per token"
        f"{spread(found.tpot)}{sure}"
    )]  # fmt: skip


@parts.register
def _(a: TensorParallel) -> list[Part]:
    rows = [
        [str(n), seconds(value), decimal(1 / value), seconds(a.terms[n]["all_reduce"]), yes(a.fits[n])]
        for n, value in a.seconds.items()
    ]
    best = a.best_degree_continuous
    return [
        Text(f"batch {a.batch}, context {a.context}"),
        Grid(["GPUs", "step", "tok/s/user", "all-reduce", "weights fit"], rows),
        Text(f"best of these: {a.best_degree}" + (f"; continuous optimum at batch 1: {best:.1f}" if best else "")),
        Drawing(partial(figures.degrees, answer=a)),
    ]  # fmt: skip


@parts.register
def _(a: Explained) -> list[Part]:
    changes = [
        [s.change, times(s.throughput), times(s.batch), count(s.capacity), s.then_limited_by]
        for s in a.sensitivities if s.capacity
    ]  # fmt: skip
    title = "One change at a time, at as many sequences as it allows"
    table = Grid(["change", "tok/s", "batch", "sequences", "then limited by"], changes, title)
    limit = f"limited by {a.limited_by}" + (f" within {a.tpot_ms:g} ms per token" if a.tpot_ms else "")
    return [
        *parts.dispatch(Step)(a),
        Text(f"largest term: {a.largest_term.replace('_', ' ')}, {a.largest_share:.0%} of the step"),
        Text(f"capacity here: {a.capacity} sequences, {limit}"),
        *(Text(f"next: {line}") for line in a.next_limits),
        *([table] if changes else []),
        Drawing(partial(figures.frontier, answer=a.frontier)),
    ]


@parts.register
def _(a: Served) -> list[Part]:
    lines: list[Part] = [
        Text(f"{a.engine}, {a.concurrency:g} requests in flight, {a.input_tokens:g} tokens in, {a.output_tokens:g} out")
    ]
    for name, found, bound in (("TTFT", a.ttft, a.bound_ttft), ("TPOT", a.tpot, a.bound_tpot)):
        middle = f"{seconds(found.p50)}{spread(found)}; " if found else ""
        lines.append(Text(f"{name}: {middle}bound {seconds(bound)}"))
    if a.abstained:
        return [*lines, Text(f"abstains: {a.abstained}", "warn")]
    return [*lines, waterfall(a.terms, a.seconds)]
