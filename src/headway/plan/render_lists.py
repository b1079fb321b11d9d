"""How lists and judgements are shown: models, devices, audits, scores."""

from __future__ import annotations

from functools import partial

from headway.plan import figures
from headway.plan.answers_lists import Audit, Claim, Devices, Models, Score
from headway.plan.parts import document
from headway.report.document import Document, Drawing, Grid, Listing, Part, Text
from headway.report.units import count, dollars, gigabytes, parameters
from headway.roofline.hardware import Hardware


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
        basis = device.basis()
        return f"{dollars(device.price[basis].typical)} {basis} {device.price[basis].date}" if basis else "-"

    formats = ("bf16", "fp8", "fp4")
    rows = [
        [d.name, f"{d.memory / 1e9:,.0f}", f"{d.bandwidth / 1e9:,.0f}", *(peak(d, name) for name in formats),
         f"{d.link.bandwidth / 1e9:,.0f} x {d.link.group}" if d.link else "-", price(d)]
        for d in a.devices
    ]  # fmt: skip
    head = ["device", "GB", "GB/s", "bf16", "fp8", "fp4", "link GB/s", "$/h, seen"]
    sources = Listing("sources", [
        f"{d.name} ({d.date}): {d.source}" + "".join(f"; {basis} price: {p.source}" for basis, p in d.price.items())
        for d in a.devices
    ])  # fmt: skip
    what = "--hardware takes these names, and `this-machine` after `headway probe`. Peaks: dense TFLOP/s."
    return Document(f"{len(rows)} devices known by name", [Text(what), Grid(head, rows)], [sources])


@document.register
def _(a: Audit) -> Document:
    impossible = f"{a.flagged} {'is' if a.flagged == 1 else 'are'} impossible as labelled"
    lines: list[Part] = [Text(f"{a.rows} claims, {a.checked} could be checked, {impossible}")]
    if a.claims:
        why = [f"line {c.row}: {c.model} on {c.hardware}: {'; '.join(c.flags)}{_nearest(c)}" for c in a.claims]
        lines.append(Listing("impossible", why))
        if any(c.possible for c in a.claims):
            lines.append(Drawing(partial(figures.audit, answer=a)))
    if a.doubted:
        at = ", ".join(str(claim.row) for claim in a.doubted)
        doubt = "do not fit in the memory of their devices: a part was kept elsewhere, or the row is wrong"
        lines.append(Text(f"{len(a.doubted)} {doubt}; lines {at}", "warn"))
    unchecked = sorted(a.unchecked.items(), key=lambda item: -item[1])
    lines += [Text(f"not checked: {number} x {reason}") for reason, number in unchecked[:10]]
    return Document(a.file, lines)


def _nearest(c: Claim) -> str:
    if c.claimed is None or c.possible is None:
        return ""
    return f"; claimed {count(c.claimed)} tok/s, at most {count(c.possible)} are possible"


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
