"""Plots of a run: each is drawn onto given matplotlib axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.bench.records import NS_PER_MS, NS_PER_S, TOKEN_KINDS, RequestRecord
from headway.bench.server import SPLIT

MAX_LANES = 400  # requests drawn in a timeline
COLOURS = ("#c9ced6", "#9db8d9", "#2b6cb0", "#d9a441", "#b3261e")  # of the server's parts, in SPLIT's order
Draw = Callable[[Any], None]  # onto axes


def plots_of(records: Sequence[RequestRecord], predicted: dict[str, Any]) -> list[Draw]:
    """Distributions of TTFT and TPOT (with the prediction), requests and chunks over time."""
    if not records:
        return []
    drawn = [
        _distribution(records, name, label, predicted)
        for name, label in (("ttft_ms", "time to first token, ms"), ("tpot_ms", "time per output token, ms"))
        if any(getattr(record, name) is not None for record in records)
    ]
    return [*drawn, _timeline(records), _chunks(records)]


def _distribution(records: Sequence[RequestRecord], name: str, label: str, predicted: Mapping[str, Any]) -> Draw:
    def draw(axes: Any) -> None:
        values = sorted(value for record in records if (value := getattr(record, name)) is not None)
        axes.step(values, [(index + 1) / len(values) for index in range(len(values))], where="post")
        if name in predicted:
            axes.axvline(predicted[name]["predicted"], color="#b3261e", linestyle="--", label="predicted")
            axes.legend()
        axes.set(xlabel=label, ylabel="share of requests", ylim=(0, 1.02), title=f"Distribution of {label}")

    return draw


def _timeline(records: Sequence[RequestRecord]) -> Draw:
    start = min(record.intended for record in records)

    def draw(axes: Any) -> None:
        for lane, record in enumerate(records[:MAX_LANES]):
            first, last = record.first(TOKEN_KINDS), record.last(TOKEN_KINDS)
            at = (record.intended - start) / NS_PER_S
            if first is None or last is None:
                axes.plot(at, lane, "x", color="#b3261e", markersize=4)
                continue
            axes.barh(lane, (first - record.intended) / NS_PER_S, left=at, color="#9db8d9", height=0.8)
            axes.barh(lane, (last - first) / NS_PER_S, left=(first - start) / NS_PER_S, color="#2b6cb0", height=0.8)
        title = "Requests: waiting for the first token (pale), streaming (dark)"
        axes.set(xlabel="seconds", ylabel="request", title=title)

    return draw


def _chunks(records: Sequence[RequestRecord]) -> Draw:
    start = min(record.intended for record in records)

    def draw(axes: Any) -> None:
        times = [(at - start) / NS_PER_S for record in records for at, _ in record.token_events()]
        axes.hist(times, bins=60, color="#2b6cb0")
        axes.set(xlabel="seconds", ylabel="chunks received", title="Chunks over time")

    return draw


def splits(split: Mapping[str, Mapping[str, Any]], records: Sequence[RequestRecord]) -> Draw:
    """A lane per request: its parts one after the other, and a dot where the client had the last token."""

    def draw(axes: Any) -> None:
        lanes = [(r, split[str(r.index)]) for r in records if str(r.index) in split][:MAX_LANES]
        starts = [0.0] * len(lanes)
        for (part, label), colour in zip(SPLIT.items(), COLOURS, strict=True):
            widths = [(row[part] or 0.0) / 1e3 for _, row in lanes]
            axes.barh(range(len(lanes)), widths, left=starts, color=colour, height=0.8, label=label)
            starts = [left + width for left, width in zip(starts, widths, strict=True)]
        ends = [(end - r.intended) / NS_PER_MS / 1e3 if (end := r.last(TOKEN_KINDS)) else None for r, _ in lanes]
        seen = [(end, lane) for lane, end in enumerate(ends) if end is not None]
        axes.plot([end for end, _ in seen], [lane for _, lane in seen], "k.", markersize=3, label="client: last token")
        axes.legend(fontsize="small")
        axes.set(xlabel="seconds since the intended start", ylabel="request", title="What each request waited for")

    return draw
