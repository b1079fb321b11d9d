"""How deployments found for some traffic are shown."""

from __future__ import annotations

from functools import partial

from headway.plan import figures
from headway.plan.answers_lists import Finalist, Offer, Search, Tail
from headway.plan.parts import assumed, document
from headway.plan.written import broken
from headway.report.document import Commands, Document, Drawing, Grid, Listing, Part, Text
from headway.report.units import dollars, same_digits, seconds, yes


@document.register
def _(a: Search) -> Document:
    asked = [Text(traffic(a)), Text(f"{a.kind.upper()}. {a.basis}")]
    refused = Grid(["deployment", "reason"], [[r.name, r.reason] for r in a.rejected], "Rejected", left=("reason",))
    if not a.deployments:
        told = [*asked, *_played(a), refused, *assumed(a.assumptions)]
        return Document(f"No deployment of {a.model} meets the targets", told)
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
        *_played(a), Text(tried), Text(_each(first)), *_commands(first),
        *([Listing("written", a.written)] if a.written else []),
        *assumed(a.assumptions),
    ], [
        Drawing(partial(figures.search, answer=a)), _in_full(a),
        *(part for r in a.deployments[1:] for part in _commands(r)), *([refused] if a.rejected else []),
    ])  # fmt: skip


def _played(a: Search) -> list[Part]:
    """What the simulator says of the first, beside what was predicted."""
    if not a.finalists:
        return []
    ranks = {r.name: f"{r.rank}. " for r in a.deployments}
    head = ["simulated", "TTFT said", "p50/p95/p99 ms", "TPOT said", "p50/p95/p99 ms", "in time", "verdict"]
    rows, told = [], dict[str, list[str]]()
    for one in a.finalists:
        r, share = one.deployment, "-" if one.attainment is None else f"{one.attainment:.1%}"
        name = f"{ranks.get(r.name, '') if one.placed else ''}{_short(r)}"
        rows.append(
            [name, f"{r.ttft_ms:.4g}", _tail(one.ttft), f"{r.tpot_ms:.3g}", _tail(one.tpot), share, one.verdict]
        )
        told.setdefault(_told(one), []).append(name)
    return [
        Grid(head, rows, left=("verdict",)),
        *_counted(a),
        *(Text(f"{', '.join(names)}: {why}") for why, names in told.items() if why),
    ]


def _counted(a: Search) -> list[Part]:
    measured, played = (sum(getattr(one, name) for one in a.finalists) for name in ("requests", "played"))
    filling = "the others fill the batches and empty them"
    return [Text(f"{played:,} requests were played, {measured:,} of them measured: {filling}")] if played else []


def _told(one: Finalist) -> str:
    """What its verdict changes in the ranking; "" if nothing."""
    if one.verdict == "not played":
        return one.reason
    if one.near:
        change = "has a place by it" if one.placed else "stays without a place"
        return f"predicted to miss a target by a little; {one.reason}: it {change}"
    if not one.placed:
        return f"loses its place: {one.reason}"
    return f"{one.reason}: too few to tell, it keeps its place" if one.verdict == "close" else ""


def _tail(tail: Tail | None) -> str:
    return (
        "-"
        if tail is None
        else "/".join(f"{ms:.3g}" if ms < 1000 else f"{ms:.0f}" for ms in (tail.p50, tail.p95, tail.p99))
    )


def _short(r: Offer) -> str:
    """The deployment in few letters: replicas, P of them for prefill and D for decode, each so many GPUs."""
    own, device = _way(r.gpus // r.pipeline, r.attention_dp, r.pipeline), r.hardware.removesuffix("-sxm")
    if r.prefill is None:
        return f"{r.replicas} x {own} {device} {r.precision}"
    first, before = _way(r.prefill.gpus, r.prefill.attention_dp), r.prefill.hardware.removesuffix("-sxm")
    if (first, before) == (own, device):
        return f"{r.prefill_replicas}P+{r.replicas}D x {own} {device} {r.precision}"
    other = "" if before == device else f" {before}"
    return f"{r.prefill_replicas}P {first}{other}+{r.replicas}D {own} {device} {r.precision}"


def _way(stage: int, attention_dp: int, pipeline: int = 1) -> str:
    dp, stages = f"-DP{attention_dp}" if attention_dp > 1 else "", f"-PP{pipeline}" if pipeline > 1 else ""
    return f"TP{stage}{stages}{dp}"


def _guessed(r: Offer) -> str:
    return "~" if r.basis == "extrapolated" else ""


def _power(r: Offer) -> str:
    if r.watts is None or r.joules_per_output_token is None:
        return ""
    return f"; all draw {r.watts / 1e3:.3g} kW, {r.joules_per_output_token:.2g} J per output token"


def _each(r: Offer) -> str:
    """What one replica of it does."""
    pool = f"; the {r.prefill_replicas} prefill workers take the prompts" if r.prefill else f"; chunks of {r.chunk:,}"
    return (
        f"each of the {r.replicas} that decode has {r.batch:.3g} requests at once, {r.peak_batch} at the percentile, "
        f"and room for {r.rows}{pool}{_power(r)}"
    )


def _commands(r: Offer) -> list[Part]:
    """What runs it, engine by engine."""
    each = f", each of {r.replicas} replicas" if r.replicas > 1 and not r.prefill_replicas else ""
    return [Text(f"to run {r.rank}. {r.name}{each}:"), *(Commands(_lines(text)) for text in r.flags.values())]


def _lines(text: str) -> list[str]:
    return [line for command in text.split("\n") for line in broken(command)]


def _in_full(a: Search) -> Grid:
    """Every column, which a terminal has no room for."""
    head = ["deployment", "GPUs", "req/s", "goodput", "headroom", "batch (peak)", "chunk", "limit",
            "basis", "$/GPU-h", "kW", "J/token"]  # fmt: skip
    rows = [
        [f"{r.rank}. {r.name}", str(r.total_gpus), f"{r.rate:.3g}", f"{r.goodput:.3g}", f"{r.headroom:.0%}",
         f"{r.batch:.1f} ({r.peak_batch})", str(r.chunk), r.limited_by, r.basis, dollars(r.price_per_gpu_hour),
         f"{r.watts / 1e3:.3g}" if r.watts else "-",
         f"{r.joules_per_output_token:.2g}" if r.joules_per_output_token else "-"]
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
    rate = f"{t.rate:.3g} requests/s of"
    if t.users:
        first = f": {a.deployments[0].rate:.3g} requests/s with the first" if a.deployments else ""
        rate = f"{t.users:g} users who think for {t.think:g} s{first}, of"
    return (
        f"{rate} {t.input_tokens:.0f} tokens in ({t.cache_hit:.0%} cached) and "
        f"{t.output_tokens:.0f} out ({t.source}){promise}"
    )
