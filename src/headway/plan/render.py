"""Answers of `headway plan` as documents: one function per kind of answer, for the terminal and the page alike."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial, singledispatch

from headway.plan import figures
from headway.plan.answers import (
    Answer,
    Audit,
    Capacity,
    Cost,
    CostTable,
    Devices,
    Explained,
    Frontier,
    Levers,
    Models,
    Offer,
    Prefill,
    Ratio,
    Score,
    Search,
    Served,
    Step,
    TensorParallel,
)
from headway.report.document import Bars, Commands, Document, Drawing, Grid, Listing, Part, Text
from headway.report.units import count, decimal, dollars, gigabytes, parameters, same_digits, seconds, times, yes
from headway.roofline.hardware import Hardware
from headway.roofline.timing import Range

CACHE = {0.5: "4-bit", 1.0: "8-bit", 2.0: "16-bit", 4.0: "32-bit"}  # by bytes per number


@singledispatch
def document(answer: object) -> Document:
    """The whole answer."""
    raise TypeError(type(answer))


@document.register
def _(a: Answer) -> Document:
    """Title, what it says, its notes and its assumptions."""
    gpus = f"{a.gpus} x " if a.gpus else ""
    what = (
        f"weights {a.precision}, {CACHE.get(a.kv_bytes_per_number, 'no')} cache, arithmetic {a.math}; "
        f"{a.mode} mode, {a.kind.upper()}"
    )
    notes = [Text(f"note: {note}", "warn") for note in a.notes]
    parts_of = [Text(what, "kind"), *parts(a), *notes, *_assumptions(a.assumptions)]
    return Document(f"{a.model} on {gpus}{a.hardware}", parts_of)


def _assumptions(lines: list[str]) -> list[Part]:
    return [Listing("assumed", lines, "note")]


@singledispatch
def parts(answer: Answer) -> list[Part]:
    """What one kind of answer says."""
    raise TypeError(type(answer))


def waterfall(terms: Mapping[str, float], total: float) -> Bars:
    """Seconds per term, largest first; terms that are 0 here are left out."""
    shown = sorted(((value, name) for name, value in terms.items() if value), reverse=True)
    return Bars([(name.replace("_", " "), seconds(value), value / total) for value, name in shown])


@parts.register
def _(a: Step) -> list[Part]:
    beside = f", {a.chunk} prompt tokens beside" if a.chunk else ""
    what = f"decode step, batch {a.batch}, context {a.context}{beside}"
    lines: list[Part] = []
    if not a.fits:
        lines.append(Text(f"does not fit: {_needs(a.gpus_needed)}", "bad"))
        what = f"if it did, a {what}"
    lines.append(Text(f"{what}: {seconds(a.seconds)}{_spread(a.range)}, bound by {a.binds}"))
    each = f", {decimal(a.tokens_per_second_per_user)} tok/s per user" if a.batch > 1 else ""
    lines += [
        Text(f"{decimal(a.tokens_per_second)} tok/s{each}"),
        waterfall(a.terms, a.seconds), Drawing(partial(figures.waterfall, answer=a), on_page=False),
    ]  # fmt: skip
    return lines


def _spread(found: Range | None) -> str:
    return f", p10-p90 {seconds(found.p10)} to {seconds(found.p90)}" if found else ""


def _needs(gpus: int | None) -> str:
    return f"needs {gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "no number of these GPUs holds it"


@parts.register
def _(a: Prefill) -> list[Part]:
    cached = f" ({a.cached_tokens} cached)" if a.cached_tokens else ""
    rate = "" if a.mfu is None else f" at {a.mfu:.0%} MFU"
    what = f"prefill of {a.input_tokens} tokens{cached}{rate}: {seconds(a.seconds)}{_spread(a.range)}"
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
        Drawing(partial(figures.frontier, answer=a)),
    ]  # fmt: skip


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
    ]


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


def _input_kind(mfu: float) -> str:
    return "bound" if mfu == 1 else f"estimate at {mfu:.0%} MFU"


@parts.register
def _(a: Cost) -> list[Part]:
    fits = "" if a.fits else "; does not fit in memory"
    prompt = f"input, {_input_kind(a.mfu)}"
    rows = [
        ["output, bound", dollars(a.usd_per_million_output), count(a.decode_tokens_per_second)],
        [prompt, dollars(a.usd_per_million_fresh_input), count(a.prefill_tokens_per_second)],
    ]
    if a.cache_hit:
        rows.append([f"{prompt}, {a.cache_hit:.0%} cached", dollars(a.usd_per_million_input), ""])
    return [
        Text(f"batch {a.batch}, context {a.context}: {dollars(a.usd_per_hour)}/h{fits}"),
        Grid(["", "$/M tokens", "tok/s"], rows),
    ]  # fmt: skip


@parts.register
def _(a: CostTable) -> list[Part]:
    rows = [
        [str(r.batch), seconds(r.seconds), count(r.tokens_per_second), dollars(r.usd_per_million_output),
         dollars(r.usd_per_million_input), f"{r.kv_gb:.1f}",
         yes(r.fits) if r.fits else f"NO: {r.kv_gb:.0f} GB of {a.free_gb:.0f}"]
        for r in a.rows
    ]  # fmt: skip
    return [
        Text(f"$/M in: {_input_kind(a.mfu)}"),
        Grid(["batch", "step", "tok/s", "$/M out", "$/M in", "KV GB", "fits"], rows),
    ]


@parts.register
def _(a: Ratio) -> list[Part]:
    prompt = f" of {a.input_tokens} tokens" if a.input_tokens else ""
    assumed = "the bound" if a.mfu == 1 else "assumed; --mfu"
    return [
        Text(f"an output token costs {a.ratio:.2f} times an input token: {a.weights_part:.2f} for weights shared by "
             f"{a.batch} only, {a.cache_part:.2f} for reading its own cache of {a.context} tokens"),
        Text(f"input: prefill{prompt} at {a.mfu:.0%} of the peak (MFU, {assumed})"),
    ]  # fmt: skip


@parts.register
def _(a: Levers) -> list[Part]:
    rows = [
        [r.name, r.term, times(r.requests), times(r.throughput), times(r.filled), count(r.batch_after)]
        for r in a.levers
    ]
    now = a.levers[0]
    return [
        Text(f"batch {a.batch}, {a.input_tokens} tokens in, {a.output_tokens} out: now {seconds(now.seconds_before)} "
             f"per step, {count(now.batch_before)} sequences fit"),
        Grid(["lever", "term", "requests/$", "tok/s", "if refilled", "fit"], rows, left=("term",)),
        Text("requests/$: prompts and answers of such requests for the same money", "note"),
        Text(f"tok/s: with the same {a.batch} sequences; if refilled: with as many as then fit, over as many as fit "
             "now (`plan explain` counts this)", "note"),
        Listing("notes", [f"{r.name}: {r.note}" for r in a.levers if r.note], "note"),
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
        spread = f"{seconds(found.p50)}{_spread(found)}; " if found else ""
        lines.append(Text(f"{name}: {spread}bound {seconds(bound)}"))
    if a.abstained:
        return [*lines, Text(f"abstains: {a.abstained}", "warn")]
    return [*lines, waterfall(a.terms, a.seconds)]


@document.register
def _(a: Search) -> Document:
    asked = [Text(traffic(a)), Text(f"{a.kind.upper()}. {a.basis}")]
    refused = Grid(["deployment", "reason"], [[r.name, r.reason] for r in a.rejected], "Rejected", left=("reason",))
    if not a.deployments:
        return Document(
            f"No deployment of {a.model} meets the targets", [*asked, refused, *_assumptions(a.assumptions)]
        )
    head = ["deployment", "TTFT", "TPOT", "$/h", "$/M in", "$/M out", "used", "N+1"]
    prices = zip(
        *(same_digits(getattr(r, f"usd_per_{what}") for r in a.deployments)
          for what in ("hour", "million_input", "million_output")),
        strict=True,
    )  # fmt: skip
    rows = [
        [f"{r.rank}. {_short(r)}", *(_guessed(r) + seconds(ms / 1e3) for ms in (r.ttft_ms, r.tpot_ms)), *price,
         f"{r.utilisation:.0%}", yes(r.survives_one_loss)]
        for r, price in zip(a.deployments, prices, strict=True)
    ]  # fmt: skip
    first = a.deployments[0]
    tried = f"{a.considered} tried, {len(a.rejected)} rejected" + (" (the --html page says why)" if a.rejected else "")
    return Document(f"Deployments for {a.model}, cheapest first", [
        *asked, Grid(head, rows),
        Text("used: share of what it can carry; N+1: survives the loss of a replica; ~: extrapolated", "note"),
        Text(tried), *_commands(first),
        *_assumptions(a.assumptions),
    ], [
        Drawing(partial(figures.search, answer=a)), _in_full(a),
        *(part for r in a.deployments[1:] for part in _commands(r)), *([refused] if a.rejected else []),
    ])  # fmt: skip


def _short(r: Offer) -> str:
    """The deployment in few letters: replicas, P of them for prefill and D for decode, each so many GPUs."""
    replicas = f"{r.prefill_replicas}P+{r.replicas}D" if r.prefill_replicas else str(r.replicas)
    dp = f" DP{r.attention_dp}" if r.attention_dp > 1 else ""
    return f"{replicas} x TP{r.gpus}{dp} {r.hardware.removesuffix('-sxm')} {r.precision}"


def _guessed(r: Offer) -> str:
    return "~" if r.basis == "extrapolated" else ""


def _commands(r: Offer) -> list[Part]:
    """What runs it, engine by engine."""
    each = f", each of {r.replicas} replicas" if r.replicas > 1 and not r.prefill_replicas else ""
    return [Text(f"to run {r.rank}. {r.name}{each}:"), *(Commands(command.split("\n")) for command in r.flags.values())]


def _in_full(a: Search) -> Grid:
    """Every column, which a terminal has no room for."""
    head = ["deployment", "GPUs", "goodput, req/s", "headroom", "batch (peak)", "chunk", "limit",
            "basis", "$/GPU-h"]  # fmt: skip
    rows = [
        [f"{r.rank}. {r.name}", str(r.total_gpus), f"{r.goodput:.3g}", f"{r.headroom:.0%}",
         f"{r.batch:.1f} ({r.peak_batch})", str(r.chunk), r.limited_by, r.basis, dollars(r.price_per_gpu_hour)]
        for r in a.deployments
    ]  # fmt: skip
    return Grid(head, rows, "In full", left=("limit", "basis"))


def traffic(a: Search) -> str:
    """The traffic and the targets in one sentence."""
    t, target = a.traffic, a.target
    promised = [
        f"{name} {seconds(value)}"
        for name, value in (("TTFT", target.ttft), ("TPOT", target.tpot))
        if value is not None
    ]
    promise = f"; {' and '.join(promised)} for {target.share:.0%} of requests" if promised else ""
    return (
        f"{t.rate:.3g} requests/s of {t.input_tokens:.0f} tokens in ({t.cache_hit:.0%} cached) and "
        f"{t.output_tokens:.0f} out ({t.source}){promise}"
    )


@document.register
def _(a: Models) -> Document:
    rows = [
        [m.name, parameters(m.parameters), parameters(m.active_parameters), m.weight_format, gigabytes(m.weight_bytes),
         gigabytes(m.cache_bytes), count(m.context or None)]
        for m in a.models
    ]  # fmt: skip
    head = ["model", "parameters", "active", "format", "weights", "cache 8k", "context"]
    ids = Listing("hub ids", [f"{m.name}: {', '.join(m.ids)}" for m in a.models])
    what = "--model takes these names and hub ids; other hub ids, folders and .gguf files too. Cache: of 8,192 tokens."
    return Document(f"{len(rows)} models known by name", [Text(what), Grid(head, rows)], [ids])


@document.register
def _(a: Devices) -> Document:
    def peak(device: Hardware, format: str) -> str:
        return f"{device.peaks[format] / 1e12:,.0f}" if format in device.peaks else "-"

    def price(device: Hardware) -> str:
        return f"{dollars(device.price.typical)} ({device.price.date})" if device.price else "-"

    formats = ("bf16", "fp8", "fp4")
    rows = [
        [d.name, f"{d.memory / 1e9:,.0f}", f"{d.bandwidth / 1e9:,.0f}", *(peak(d, name) for name in formats),
         f"{d.link.bandwidth / 1e9:,.0f} x {d.link.group}" if d.link else "-", price(d)]
        for d in a.devices
    ]  # fmt: skip
    head = ["device", "GB", "GB/s", "bf16", "fp8", "fp4", "link GB/s", "$/h (seen)"]
    sources = Listing("sources", [
        f"{d.name} ({d.date}): {d.source}" + (f"; price: {d.price.source}" if d.price else "") for d in a.devices
    ])  # fmt: skip
    what = "--hardware takes these names, and `this-machine` after `headway probe`. Peaks: dense TFLOP/s."
    return Document(f"{len(rows)} devices known by name", [Text(what), Grid(head, rows)], [sources])


@document.register
def _(a: Audit) -> Document:
    impossible = f"{a.flagged} {'is' if a.flagged == 1 else 'are'} impossible as labelled"
    lines: list[Part] = [Text(f"{a.rows} claims, {a.checked} could be checked, {impossible}")]
    if a.claims:
        why = [f"line {c.row}: {c.model} on {c.hardware}: {'; '.join(c.flags)}" for c in a.claims]
        lines.append(Listing("impossible", why))
    if a.doubted:
        at = ", ".join(str(claim.row) for claim in a.doubted)
        doubt = "do not fit in the memory of their devices: a part was kept elsewhere, or the row is wrong"
        lines.append(Text(f"{len(a.doubted)} {doubt}; lines {at}", "warn"))
    unchecked = sorted(a.unchecked.items(), key=lambda item: -item[1])
    lines += [Text(f"not checked: {number} x {reason}") for reason, number in unchecked[:10]]
    return Document(a.file, lines)


@document.register
def _(a: Score) -> Document:
    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    rows = [
        [f"{name} {kind}", str(e.n), *map(figure, (e.mape, e.median, e.bias, e.coverage, e.abstained))]
        for name, kinds in (("TPOT", a.tpot), ("TTFT", a.ttft)) for kind, e in kinds.items() if e.n
    ]  # fmt: skip
    groups = [[f"{g.model} {g.system} {g.backend}", str(g.n), figure(g.mape)] for g in a.groups]
    return Document("Predictions against measured runs, in percent", [
        Grid(["", "rows", "mean error", "median", "bias", "in range", "abstained"], rows),
        Grid(["TPOT by group", "rows", "mean error"], groups),
        *(Text(f"{one.n} rows {what}: {reason} ({rows})") for what, one in
          (("skipped", a.skipped), ("abstained from", a.abstained)) for reason, rows in one.reasons.items()),
    ])  # fmt: skip
