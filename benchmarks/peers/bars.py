"""What was measured, turned into comparisons with bars. Pure: the same measurements give the same comparisons.

A measurement of a model at a point holds runs. Of each run: tokens/s, and the memory bandwidth probed right before and
after it (GB/s). Memory of a shared machine runs at one of two speeds and changes between them within
seconds; so a pair of runs counts for a ratio only if both saw the same speed, and a run for a share of the roof only if
the probes around it agree, unless too few do. Ratios are medians over pairs of runs that follow each other.

    roof = tokens / max(bytes of weights and cache / bandwidth, operations / arithmetic rate)
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from peers.engines import PEERS

SLOW = 45e9  # bytes/s: below it, memory is in the slower of the two speeds of the machine the bars were set on
SETTLED = 0.15  # probes that differ by more saw different speeds
FEWEST = 3  # settled ones that make the others unnecessary

Measured = dict[str, Any]
Comparison = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """batch: sequences decoding, each `context` tokens long; 0 = prefill of `context` tokens."""

    name: str
    batch: int
    context: int

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.batch or self.context


POINTS = {
    point.name: point
    for point in (
        Point("decode 1", 1, 128),
        Point("decode 4", 4, 128),
        Point("decode 8", 8, 128),
        Point("decode 32", 32, 128),
        Point("prefill 128", 0, 128),
        Point("prefill 512", 0, 512),
        Point("decode 1 at 4k", 1, 4096),
    )
}

# The least ratio to the best peer, by model, kind of peers, and point.
SAME_FILE = {"decode 1": 1.2, "decode 8": 2.0, "decode 32": 2.5, "prefill 512": 2.0, "decode 1 at 4k": 1.8}
MOE = {"decode 1": 1.2, "decode 8": 1.8, "decode 32": 2.0, "prefill 512": 2.0}
RATIO_BARS: dict[str, dict[str, dict[str, float]]] = {
    "smollm2": {"the same file": SAME_FILE},
    "1b-q4_0": {"the same file": SAME_FILE},
    "1b-q8_0": {"the same file": SAME_FILE},
    "gemma": {"the same file": {"decode 1": 1.3, "decode 8": 3.0, "decode 32": 3.0, "prefill 512": 2.5}},
    "moe-q4_k": {"the same file": MOE},
    "moe-q8_0": {"the same file": MOE},
    "latent": {"the same file": {"decode 1 at 4k": 1.5}},
    "1b-int4": {
        "int4": {"decode 1": 1.3, "decode 4": 1.8, "decode 8": 1.8, "decode 1 at 4k": 1.8},
        "any format": {
            "decode 4": 1.4, "decode 8": 1.4, "decode 32": 1.15, "prefill 512": 1.0, "decode 1 at 4k": 1.8,
        },
    },
    "1b-int8": {"int8": {"decode 1": 1.15, "decode 1 at 4k": 1.8}},
    "1b-bf16": {"bf16": {"decode 1": 0.97}},
}  # fmt: skip


def share_bar(model: str, point: str, slow: bool) -> float | None:
    """The least share of the roof."""
    if point == "decode 1":
        return 0.9 if slow else 0.7
    if point in ("decode 32", "prefill 512"):
        return 0.9 if model == "1b-bf16" else 0.75
    return None


def roof_seconds(point: Point, facts: Measured, bandwidth: float, rate: float) -> float:
    """The least time of a step. A prefill's cache traffic and attention are left out, which makes shares smaller. Of
    routed experts, those count that even routing touches."""
    rows = point.batch or 1
    read = facts["bytes"] + facts.get("experts", {}).get(str(point.tokens), 0)
    read += facts["cache"] * point.context * rows if point.batch else 0
    operations = 2 * (facts["body"] * point.tokens + facts["head"] * rows)
    return max(read / bandwidth, operations / rate)


def settled(runs: list[Any], agree: list[bool]) -> list[Any]:
    """Those that agree, or all if there are too few."""
    chosen = [run for run, yes in zip(runs, agree, strict=True) if yes]
    return chosen if len(chosen) >= FEWEST else runs


def bandwidth_of(run: Measured) -> float:
    """Bytes/s."""
    return sum(run["gb_s"]) / 2 * 1e9


def close(a: float, b: float) -> bool:
    return abs(a - b) <= SETTLED * max(a, b)


def steady(run: Measured) -> bool:
    return close(*run["gb_s"])


def comparison(name: str, ours: float | None, peer: float | None, ratio: float | None, bar: float | None, **more: Any
               ) -> Comparison:  # fmt: skip
    """Every bar says: ratio at least `bar`. met: None where there is no ratio or no bar."""
    met = None if ratio is None or bar is None else ratio >= bar
    digits = [None if value is None else float(f"{value:.4g}") for value in (ours, peer, ratio, bar)]
    return {"name": name, **dict(zip(("ours", "peer", "ratio", "bar"), digits, strict=True)), "met": met, **more}


def against_peers(model: str, point: str, measured: Measured) -> list[Comparison]:
    """One comparison per kind of peers, with the one we are least ahead of."""
    rows = []
    for kind, bars in RATIO_BARS[model].items():
        best: Comparison | None = None
        missing = {}
        for name, found in measured["peers"].items():
            if kind in ("int4", "int8", "bf16") and PEERS[name].bits != kind:
                continue
            if "reason" in found:
                missing[name] = found["reason"]
                continue
            alike = [
                steady(a) and steady(b) and close(bandwidth_of(a), bandwidth_of(b))
                for a, b in zip(found["ours"], found["runs"], strict=True)
            ]
            pairs = settled(list(zip(found["ours"], found["runs"], strict=True)), alike)
            ratio = statistics.median(a["rate"] / b["rate"] for a, b in pairs)
            if best is None or ratio < best["ratio"]:
                best = comparison(
                    "",
                    statistics.median(a["rate"] for a, _ in pairs),
                    statistics.median(b["rate"] for _, b in pairs),
                    ratio,
                    bars.get(point),
                    best_peer=name,
                    ours_is="engine" if PEERS[name].serves else "kernels",
                    pairs=len(pairs),
                )
        best = best or comparison("", None, None, None, bars.get(point))
        title = f"{model}, {point}, against {kind}"
        both = {way: statistics.median(run["rate"] for run in measured[way]) for way in ("kernels", "engine")}
        rows.append({**best, "name": title, "model": model, "point": point, **both, "missing": missing})
    return rows


def against_roofs(model: str, point: str, measured: Measured) -> list[Comparison]:
    """Share of the roof, in each of memory's two speeds if the bars ask, and what else hangs on the roofs."""
    rows = []
    facts, rate, at = measured["facts"], measured["operations_per_s"], POINTS[point]
    runs = settled(measured["kernels"], [steady(run) for run in measured["kernels"]])
    slow = [run for run in runs if bandwidth_of(run) < SLOW]
    fast = [run for run in runs if bandwidth_of(run) >= SLOW]
    labelled = (
        [("slow memory", True, slow), ("fast memory", False, fast)] if point == "decode 1" else [("", True, runs)]
    )
    for label, is_slow, group in labelled:
        if group:
            roofs = [at.tokens / roof_seconds(at, facts, bandwidth_of(run), rate) for run in group]
            share = statistics.median(run["rate"] / roof for run, roof in zip(group, roofs, strict=True))
            title = ", ".join(filter(None, (f"{model}, {point}, share of the roof", label)))
            ours = statistics.median(run["rate"] for run in group)
            bar = share_bar(model, point, is_slow)
            bandwidth = statistics.median(map(bandwidth_of, group)) / 1e9
            more = {"model": model, "point": point, "runs": len(group), "bandwidth_gb_s": round(bandwidth, 1)}
            rows.append(comparison(title, ours, statistics.median(roofs), share, bar, share_of_roof=round(share, 3),
                                   share_bar=bar, **more))  # fmt: skip
    if point == "decode 4" and model == "1b-int4" and slow:
        one = POINTS["decode 1"]
        steps = [4 / run["rate"] for run in slow]
        roofs = [roof_seconds(one, facts, bandwidth_of(run), rate) for run in slow]
        ratio = statistics.median(roof / step for roof, step in zip(roofs, steps, strict=True))
        title = f"{model}, roof of a step of 1 over a step of 4, seconds, slow memory"
        rows.append(comparison(title, statistics.median(steps), statistics.median(roofs), ratio, 1 / 1.15))
    if point == "decode 1 at 4k":
        reads = [facts["cache"] * at.context / run["attention"] / 1e9 for run in runs]
        probed = [bandwidth_of(run) / 1e9 for run in runs]
        ratio = statistics.median(a / b for a, b in zip(reads, probed, strict=True))
        title = f"{model}, attention at 4k reads, GB/s"
        rows.append(comparison(title, statistics.median(reads), statistics.median(probed), ratio, 0.6))
    return rows


def against_predictions(model: str, point: str, measured: Measured) -> list[Comparison]:
    """`headway doctor`'s tokens/s from the probe of the same seconds, within 15 %; host time of a step of 32."""
    rows = []
    runs = settled(measured["engine"], [steady(run) for run in measured["engine"]])
    foretold = [run for run in runs if "predicted" in run]
    if foretold:
        ratio = statistics.median(run["rate"] / run["predicted"] for run in foretold)
        ours = statistics.median(run["rate"] for run in foretold)
        peer = statistics.median(run["predicted"] for run in foretold)
        title = f"{model}, {point}, agreement with the predicted tokens/s"
        rows.append(comparison(title, ours, peer, 1 - abs(ratio - 1), 0.85))
    if point == "decode 32":
        rows.append(at_most(f"{model}, {point}, host milliseconds per step", 1e3 * statistics.median(
            run["host"] for run in runs), 0.5))  # fmt: skip
    return rows


def at_most(name: str, value: float, limit: float, **more: Any) -> Comparison:
    """ours is to be no more than peer, which is the limit."""
    return comparison(name, value, limit, limit / value, 1.0, **more)


def comparisons(measured: Measured) -> list[Comparison]:
    """All of a report's `models` and `checks`."""
    rows = []
    for model, points in measured["models"].items():
        for point, one in points.items():
            if point == "memory":
                limit = 1.15 * (one["weights"] + one["cache"])
                more = {"without_mapped_files_gb": round(one["anonymous"] / 1e9, 3)}
                rows.append(at_most(f"{model}, peak memory, GB", one["peak"] / 1e9, limit / 1e9, **more))
                continue
            rows += against_peers(model, point, one)
            rows += against_roofs(model, point, one)
            rows += against_predictions(model, point, one)
    for name, check in measured["checks"].items():
        if name == "accuracy":
            title = "smollm2, mean KL to the dequantised reference"
            rows.append(at_most(title, check["mean"], 0.01, percentile_99_9=check["percentile_99_9"]))
        else:
            rows.append(at_most("demo, seconds from start to end of one token", check["seconds"], 1.0))
    return rows
