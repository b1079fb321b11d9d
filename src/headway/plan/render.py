"""Answers of `headway plan` on a terminal: plain tables, units beside every figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Answer = dict[str, Any]


def seconds(value: float | None) -> str:
    """A duration in the unit that reads best."""
    if value is None:
        return "-"
    for limit, scale, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if value < limit:
            return f"{value * scale:.3g} {unit}" if value else "0"
    return f"{value:.3g} s"


def count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def times(value: float | None) -> str:
    """A ratio to now; "-" where there is nothing now."""
    return "-" if value is None else f"{value:.2f}x"


def dollars(value: float | None) -> str:
    return "-" if value is None else f"${value:,.2f}" if value >= 0.1 else f"${value:.4f}"


def gigabytes(value: float) -> str:
    return f"{value / 1e9:,.1f} GB"


def title(answer: Answer) -> str:
    """What, on what, in which precision, and whether this is a bound."""
    gpus = f"{answer['gpus']} x " if answer.get("gpus") else ""
    size = {2.0: "16-bit", 1.0: "8-bit", 4.0: "32-bit", 0.5: "4-bit"}.get(answer["kv_bytes_per_number"], "no")
    return (
        f"{answer['model']} on {gpus}{answer['hardware']}: weights {answer['precision']}, {size} cache, "
        f"arithmetic {answer['math']}; {answer['mode']} mode, {answer['kind'].upper()}"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned right, the first left."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *rest]).rstrip()

    return "\n".join([line(head), "  ".join("-" * w for w in widths), *(line(row) for row in rows)])


def waterfall(terms: dict[str, float], total: float) -> str:
    """Seconds per term with a bar; memory and arithmetic overlap in a bound, so bars need not add up."""
    width = max(len(name) for name in terms)
    lines = []
    for name, value in sorted(terms.items(), key=lambda item: -item[1]):
        bar = "#" * min(40, round(40 * value / total)) if total else ""
        lines.append(f"  {name.replace('_', ' '):<{width}}  {seconds(value):>9}  {bar}")
    return "\n".join(lines)


def step(a: Answer) -> str:
    what = f"decode step, batch {a['batch']}, context {a['context']}"
    what += f", {a['chunk']} prompt tokens beside" if a["chunk"] else ""
    lines = [
        title(a),
        f"{what}: {seconds(a['seconds'])}, bound by {a['binds']}",
        *([f"range p10-p90: {seconds(a['p10'])} to {seconds(a['p90'])} ({a['engine']})"] if "p10" in a else []),
        f"{a['tokens_per_second']:,.0f} tok/s, {a['tokens_per_second_per_user']:,.1f} tok/s per user",
        waterfall(a["terms"], a["seconds"]),
    ]
    if not a["fits"]:
        lines.append("does NOT fit in memory at this batch and context")
    return "\n".join(lines + a["notes"])


def prefill(a: Answer) -> str:
    return "\n".join([
        title(a),
        f"prefill of {a['input_tokens']} tokens ({a['cached_tokens']} cached) at {a['mfu']:.0%} MFU: "
        f"{seconds(a['seconds'])}, {a['tokens_per_second']:,.0f} tok/s, bound by {a['binds']}",
        waterfall(a["terms"], a["seconds"]),
    ])  # fmt: skip


def frontier(a: Answer) -> str:
    rows = [
        [str(p["batch"]), seconds(p["seconds"]), f"{p['tokens_per_second_per_user']:.1f}",
         count(p["tokens_per_second_per_gpu"]), p["binds"], "yes" if p["fits"] else "NO"]
        for p in a["points"]
    ]  # fmt: skip
    return "\n".join([
        title(a),
        f"context {a['context']}: knee at batch {count(a['knee'])} (weights only), critical context "
        f"{count(a['critical_context'])} tokens, ceiling {count(a['ceiling'])} tok/s/GPU, {a['fits_batch']} fit",
        table(["batch", "step", "tok/s/user", "tok/s/GPU", "bound by", "fits"], rows),
    ])  # fmt: skip


def capacity(a: Answer) -> str:
    lines = [title(a), f"{a['batch']} sequences of {a['context']} tokens, limited by {a['limited_by']}"]
    if not a["batch"]:
        lines[-1] += f" ({a['because']})"
    rows = [["memory", count(a["memory_batch"])]]
    if a["tpot_ms"] is not None:
        rows.append([f"reading within {a['tpot_ms']:g} ms (tpot-memory)", count(a["tpot_memory_batch"])])
        rows.append([f"arithmetic within {a['tpot_ms']:g} ms (tpot-compute)", count(a["tpot_compute_batch"])])
    lines.append(table(["limit", "sequences"], rows))
    lines.append(f"{gigabytes(a['free_bytes'])} left for the cache, {gigabytes(a['bytes_per_sequence'])} per sequence")
    return "\n".join(lines)


def tensor_parallel(a: Answer) -> str:
    rows = [
        [degree, seconds(value), f"{1 / value:,.1f}", seconds(a["terms"][degree]["all_reduce"]),
         "yes" if a["fits"][degree] else "NO"]
        for degree, value in a["seconds"].items()
    ]  # fmt: skip
    best = a["best_degree_continuous"]
    return "\n".join([
        title(a),
        f"batch {a['batch']}, context {a['context']}, {a['all_reduce']}, {a['link_latency_us']:g} us per hop",
        table(["GPUs", "step", "tok/s/user", "all-reduce", "weights fit"], rows),
        f"best of these: {a['best_degree']}" + (f"; continuous optimum at batch 1: {best:.1f}" if best else ""),
    ])  # fmt: skip


def _input_kind(a: Answer) -> str:
    return "bound" if a["mfu"] == 1 else f"estimate at {a['mfu']:.0%} MFU"


def cost(a: Answer) -> str:
    fits = "" if a["fits"] else "; does NOT fit in memory"
    prompt = f"input, {_input_kind(a)}"
    return "\n".join([
        title(a),
        f"batch {a['batch']}, context {a['context']}, {a['utilisation']:.0%} utilised{fits}",
        f"{dollars(a['usd_per_hour'])}/h at {dollars(a['price_per_gpu_hour'])} per GPU-hour ({a['price_source']})",
        table(["", "$/M tokens", "tok/s"], [
            ["output, bound", dollars(a["usd_per_million_output"]), count(a["decode_tokens_per_second"])],
            [prompt, dollars(a["usd_per_million_fresh_input"]), count(a["prefill_tokens_per_second"])],
            [f"{prompt}, {a['cache_hit']:.0%} cached", dollars(a["usd_per_million_input"]), ""],
        ]),
    ])  # fmt: skip


def cost_table(a: Answer) -> str:
    rows = [
        [str(r["batch"]), seconds(r["seconds"]), count(r["tokens_per_second"]), dollars(r["usd_per_million_output"]),
         dollars(r["usd_per_million_input"]), f"{r['kv_gb']:.1f}",
         "yes" if r["fits"] else f"NO: {r['kv_gb']:.0f} GB of {a['free_gb']:.0f}"]
        for r in a["rows"]
    ]  # fmt: skip
    lines = [
        title(a),
        f"weights only; {dollars(a['price_per_gpu_hour'])} per GPU-hour; $/M in: {_input_kind(a)}; weights "
        f"{a['weights_gb']:,.0f} GB of {a['memory_gb']:,.0f} GB; cache sized at context {a['context']}",
        table(["batch", "step", "tok/s", "$/M out", "$/M in", "KV GB", "fits"], rows),
    ]
    slower = [str(r["batch"]) for r in a["rows"] if r["compute_seconds"] > r["seconds"]]
    if slower:
        lines.append(f"batch {', '.join(slower)}: the arithmetic, left out here, takes longer than reading the weights")
    return "\n".join(lines)


def ratio(a: Answer) -> str:
    prompt = f" of {a['input_tokens']} tokens" if a["input_tokens"] else ""
    assumed = "the bound" if a["mfu"] == 1 else "assumed; --mfu"
    return (
        f"{title(a)}\nan output token costs {a['ratio']:.2f} times an input token: {a['weights_part']:.2f} for weights "
        f"shared by {a['batch']} only, {a['cache_part']:.2f} for reading its own cache of {a['context']} tokens\n"
        f"input: prefill{prompt} at {a['mfu']:.0%} of the peak (MFU, {assumed})"
    )


def levers(a: Answer) -> str:
    rows = [
        [r["name"], r["term"], f"{r['throughput']:.2f}x",
         f"{seconds(r['seconds_before'])} -> {seconds(r['seconds_after'])}",
         f"{count(r['batch_before'])} -> {count(r['batch_after'])}", r["note"]]
        for r in a["levers"]
    ]  # fmt: skip
    head = ["lever", "term", "tok/s", "step", "fits", "note"]
    return f"{title(a)}\nbatch {a['batch']}, {a['input_tokens']} in, {a['output_tokens']} out\n{table(head, rows)}"


def explain(a: Answer) -> str:
    rows = [
        [s["change"], times(s["throughput"]), times(s["batch"]), count(s["capacity"]), s["then_limited_by"]]
        for s in a["sensitivities"]
    ]
    lines = [
        title(a),
        f"batch {a['batch']}, context {a['context']}: {seconds(a['seconds'])}, bound by {a['binds']}; "
        f"{a['largest_term'].replace('_', ' ')} is {a['largest_share']:.0%} of the step",
        waterfall(a["terms"], a["seconds"]),
        f"capacity here: {a['capacity']} sequences, limited by {a['limited_by']}",
        *(f"next: {line}" for line in a["next_limits"]),
        table(["change", "tok/s", "batch", "sequences", "then limited by"], rows),
    ]
    return "\n".join(lines + a["notes"])


def traffic(a: Answer) -> str:
    """The traffic and the targets in one sentence."""
    t, target = a["traffic"], a["target"]
    promised = [
        f"{name} {target[key] * 1e3:g} ms"
        for name, key in (("TTFT", "ttft"), ("TPOT", "tpot"))
        if target[key] is not None
    ]
    promise = f"; {' and '.join(promised)} for {target['share']:.0%} of requests" if promised else ""
    return (
        f"{t['rate']:.3g} requests/s of {t['input_tokens']:.0f} tokens in ({t['cache_hit']:.0%} cached) and "
        f"{t['output_tokens']:.0f} out ({t['source']}){promise}"
    )


def _tpot(row: Answer) -> str:
    """TPOT in ms, with its range where there is one."""
    if row["tpot_p10_ms"] is None:
        return f"{row['tpot_ms']:.1f}"
    return f"{row['tpot_ms']:.1f} ({row['tpot_p10_ms']:.1f}-{row['tpot_p90_ms']:.1f})"


def search(a: Answer) -> str:
    lines = [f"{a['model']}, {a['kind'].upper()}: {traffic(a)}", a["basis"]]
    rows = [
        [f"{r['rank']}. {r['name']}", str(r["total_gpus"]), f"{r['ttft_ms']:,.0f}", _tpot(r),
         f"{r['goodput']:.3g}", f"{r['utilisation']:.0%}", dollars(r["usd_per_hour"]),
         dollars(r["usd_per_million_input"]), dollars(r["usd_per_million_output"]),
         "yes" if r["survives_one_loss"] else "no", r["limited_by"], r["basis"]]
        for r in a["deployments"]
    ]  # fmt: skip
    head = [
        "deployment",
        "GPUs",
        "TTFT ms",
        "TPOT ms",
        "goodput/s",
        "used",
        "$/h",
        "$/M in",
        "$/M out",
        "N+1",
        "limit",
        "basis",
    ]
    if rows:
        lines += [
            table(head, rows),
            "",
            "to run the first:",
            *(f"  {line}" for line in a["deployments"][0]["flags"].values()),
        ]
    else:
        lines.append("no deployment meets the targets; reasons:")
        lines += [f"  {row['name']}: {row['reason']}" for row in a["rejected"]]
    return "\n".join(lines)


def audit(a: Answer) -> str:
    lines = [
        f"{a['file']}: {a['rows']} claims, {a['checked']} could be checked, {a['flagged']} are impossible as labelled"
    ]
    for claim in a["claims"]:
        lines.append(f"  line {claim['row']}: {claim['model']} on {claim['hardware']}: {'; '.join(claim['flags'])}")
    unchecked = sorted(a["unchecked"].items(), key=lambda item: -item[1])
    lines += [f"not checked: {number} x {reason}" for reason, number in unchecked[:10]]
    return "\n".join(lines)


def estimate(a: Answer) -> str:
    lines = [
        f"{a['model']} on {a['gpus']} x {a['hardware']}, {a['engine']} {a['precision']}: {a['kind'].upper()}",
        f"{a['concurrency']:g} requests in flight, {a['input_tokens']:g} tokens in, {a['output_tokens']:g} out",
    ]
    for name in ("ttft", "tpot"):
        found, bound = a[name], seconds(a["bound_" + name])
        spread = (
            f"{seconds(found['p50'])}, p10-p90 {seconds(found['p10'])} to {seconds(found['p90'])}; " if found else ""
        )
        lines.append(f"{name.upper()}: {spread}bound {bound}")
    if a["abstained"]:
        lines.append(f"abstains: {a['abstained']}")
    elif a["terms"]:
        lines.append(waterfall(a["terms"], a["seconds"]))
    return "\n".join(lines)


def score(a: Answer) -> str:
    def figure(value: float | None) -> str:
        return "-" if value is None else f"{value:.1f}"

    columns = ("mape", "median", "bias", "coverage", "abstained")
    rows = [
        [f"{metric} {kind}", str(part["n"]), *(figure(part[key]) for key in columns)]
        for metric in ("tpot", "ttft") for kind, part in a[metric].items()
    ]  # fmt: skip
    head = ["percent", "rows", "mean error", "median", "bias", "in range", "abstained"]
    groups = [[f"{g['model']} {g['system']} {g['backend']}", str(g["n"]), figure(g["mape"])] for g in a["groups"]]
    return table(head, rows) + "\n\n" + table(["group (TPOT)", "rows", "mean error"], groups)
