"""What `headway top` shows: two scrapes of /metrics, folded into rates and percentiles of the time between them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_SAMPLE = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LE = re.compile(r'\ble="([^"]+)"')
_MODEL = re.compile(r'model_name="([^"]*)"')
_KEY = re.compile(r'\bkey="([^"]*)"')
BILLED = "headway:billed_seconds_total"


@dataclass(frozen=True)
class Scrape:
    """One reading of /metrics.

    Attributes:
        at: seconds of the reader's clock.
        values: sum over label sets, by name.
        buckets: cumulative counts by name and upper bound.
        model: of the model_name label.
        billed: seconds of the machine on receipts, by key.
    """

    at: float
    values: dict[str, float]
    buckets: dict[str, dict[float, float]]
    model: str
    billed: dict[str, float]


def parse(text: str, at: float) -> Scrape:
    """Read Prometheus text; lines that are no samples are skipped."""
    values: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    billed: dict[str, float] = {}
    model = ""
    for line in text.splitlines():
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            continue
        name, labels, value = sample["name"], sample["labels"] or "", float(sample["value"])
        bound = _LE.search(labels)
        if bound is not None:
            of = buckets.setdefault(name.removesuffix("_bucket"), {})
            of[float(bound[1])] = of.get(float(bound[1]), 0.0) + value
        else:
            values[name] = values.get(name, 0.0) + value
        key = _KEY.search(labels)
        if key is not None and name == BILLED:
            billed[key[1]] = billed.get(key[1], 0.0) + value
        found = _MODEL.search(labels)
        model = found[1] if found else model
    return Scrape(at, values, buckets, model, billed)


@dataclass(frozen=True)
class View:
    """Numbers of the time between two scrapes.

    Attributes:
        running, waiting, kv_usage: at the second one; usage is a share.
        output_rate, prompt_rate: tokens per second.
        ttft, itl: (p50, p90, p99) in seconds, upper ends of the histogram's buckets; NaN if nothing was observed.
        hit_share: of prompt tokens, from the prefix cache; NaN if none were looked up.
        finished: requests since the server's start, by the second scrape.
        step_ratio: measured over predicted time of recent steps; NaN if nothing predicts. step_error: mean of its
            distance from 1. outside: they have left the range of the machine's profile.
        keys: (key, share) of what was billed for answers that ended in this time, the largest first.
    """

    model: str
    running: int
    waiting: int
    kv_usage: float
    output_rate: float
    prompt_rate: float
    ttft: tuple[float, float, float]
    itl: tuple[float, float, float]
    hit_share: float
    finished: int
    step_ratio: float = math.nan
    step_error: float = math.nan
    outside: bool = False
    keys: tuple[tuple[str, float], ...] = ()


def view(before: Scrape, after: Scrape) -> View:
    seconds = max(after.at - before.at, 1e-9)

    def grown(name: str) -> float:
        return after.values.get(name, 0.0) - before.values.get(name, 0.0)

    queries = grown("headway:prefix_cache_queries_total")
    return View(
        model=after.model,
        running=int(after.values.get("headway:requests_running", 0)),
        waiting=int(after.values.get("headway:requests_waiting", 0)),
        kv_usage=after.values.get("headway:kv_cache_usage", 0.0),
        output_rate=grown("headway:generation_tokens_total") / seconds,
        prompt_rate=grown("headway:prompt_tokens_total") / seconds,
        ttft=_percentiles(before, after, "headway:time_to_first_token_seconds"),
        itl=_percentiles(before, after, "headway:inter_token_latency_seconds"),
        hit_share=grown("headway:prefix_cache_hits_total") / queries if queries else math.nan,
        finished=int(after.values.get("headway:requests_finished_total", 0)),
        step_ratio=after.values.get("headway:step_time_ratio", math.nan),
        step_error=after.values.get("headway:step_time_error", math.nan),
        outside=after.values.get("headway:step_times_outside_profile", 0) > 0,
        keys=_keys(before, after),
    )


def _keys(before: Scrape, after: Scrape) -> tuple[tuple[str, float], ...]:
    grown = {key: seconds - before.billed.get(key, 0.0) for key, seconds in after.billed.items()}
    total = sum(grown.values())
    shares = ((key, seconds / total) for key, seconds in grown.items() if seconds > 0)
    return tuple(sorted(shares, key=lambda pair: -pair[1]))


def _percentiles(before: Scrape, after: Scrape, name: str) -> tuple[float, float, float]:
    """Upper end of the bucket that holds p50, p90 and p99 of what was observed in between."""
    old = before.buckets.get(name, {})
    counts = sorted((bound, count - old.get(bound, 0.0)) for bound, count in after.buckets.get(name, {}).items())
    total = counts[-1][1] if counts else 0.0
    if not total:
        return (math.nan, math.nan, math.nan)
    p50, p90, p99 = (next(bound for bound, count in counts if count >= share * total) for share in (0.5, 0.9, 0.99))
    return (p50, p90, p99)
