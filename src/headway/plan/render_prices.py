"""How the verbs about dollars are shown."""

from __future__ import annotations

import msgspec

from headway.plan.answers_prices import Cost, CostTable, Levers, PriceList, Ratio, ServedPrice
from headway.plan.parts import parts
from headway.report.document import Grid, Listing, Part, Text
from headway.report.units import count, dollars, seconds, times, yes
from headway.roofline.timing import Range


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
        *_served(a.served, a.abstained),
    ]  # fmt: skip


def _served(found: ServedPrice | None, abstained: str) -> list[Part]:
    """What an engine's requests are estimated to cost, in a table of its own: no bound is in it."""
    if found is None:
        return [Text(f"no estimate of what an engine's requests cost: {abstained}", "note")]

    def money(what: str, range: Range) -> list[str]:
        ends = f"{dollars(range.p10)} to {dollars(range.p90)}" if found.validated else "-"
        return [what, dollars(range.p50), ends]

    title = (
        f"Served by {found.engine}, estimate: {found.load:g} in flight, {found.input_tokens:g} tokens in, "
        f"{found.output_tokens:g} out"
    )
    unsure = [] if found.validated else [Text("no range: no runs with prefix hits were measured", "note")]
    return [Grid(["", "$", "p10 to p90"], [
        money("a million output tokens", found.usd_per_million_output),
        money("a million input tokens", found.usd_per_million_input),
        money("a thousand requests", Range(*(1e3 * end for end in msgspec.structs.astuple(found.usd_per_request)))),
    ], title), *unsure]  # fmt: skip


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
        [r.name, r.term, times(r.estimated), times(r.requests), times(r.throughput), times(r.filled),
         count(r.batch_after)]
        for r in a.levers
    ]  # fmt: skip
    now = a.levers[0]
    return [
        Text(f"batch {a.batch}, {a.input_tokens} tokens in, {a.output_tokens} out: now {seconds(now.seconds_before)} "
             f"per step, {count(now.batch_before)} sequences fit"),
        Grid(["lever", "term", "estimate", "bound", "tok/s", "refilled", "fit"], rows, left=("term",)),
        Text("estimate, bound: such requests, prompts included, for the same money, by an engine's measured runs "
             "(-: none of the kind) and by the bound", "note"),
        Text(f"tok/s: with the same {a.batch} sequences; refilled: with as many as then fit, over as many as fit "
             "now (`plan explain` counts this)", "note"),
        Listing("notes", [f"{r.name}: {r.note}" for r in a.levers if r.note], "note"),
    ]  # fmt: skip


@parts.register
def _(a: PriceList) -> list[Part]:
    three = (
        f"{dollars(a.input_price)} input, {dollars(a.cached_price)} cached, {dollars(a.output_price)} output "
        "per million tokens"
    )
    left = "-" if a.margin is None else f"{a.margin:.0%}"
    lines = [Text(three if a.asked else f"for a margin of {left} at batch {a.rows[-1].batch}: {three}")]
    if a.break_even_batch is None:
        lines.append(Text("no batch that fits pays for itself at these prices", "bad"))
    elif a.asked:
        lines.append(Text(f"pays from batch {a.break_even_batch} on; margin {left} at batch {a.rows[-1].batch}"))
    lines += [
        Text(f"output over input: {a.price_ratio:.1f} as sold, {a.cost_ratio:.1f} as it costs at that batch"),
        Text(f"a cached token is sold for {a.hit_cost:.0%} of a computed one; from {a.hit_share:.0%} hits on that "
             "would pay for all input"),
    ]  # fmt: skip
    rows = [
        [str(r.batch), dollars(r.usd_per_million_input), dollars(r.usd_per_million_output),
         dollars(r.usd_per_thousand_requests or 0.0), "-" if r.margin is None else f"{r.margin:.0%}"]
        for r in a.rows
    ]  # fmt: skip
    return [*lines, Grid(["batch", "$/M in", "$/M out", "$ per 1000 requests", "margin"], rows, "Costs")]
