"""Plots of a run: each is drawn onto given matplotlib axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.metrics.records import NS_PER_S, TOKEN_KINDS, RequestRecord
from headway.report.figures import DECODE, LIMIT, WAITS

MAX_LANES = 400  # requests drawn in a timeline
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
            axes.axvline(predicted[name]["predicted"], color=LIMIT, linestyle="--", label="predicted")
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
                axes.plot(at, lane, "x", color=LIMIT, markersize=4)
                continue
            axes.barh(lane, (first - record.intended) / NS_PER_S, left=at, color=WAITS, height=0.8)
            axes.barh(lane, (last - first) / NS_PER_S, left=(first - start) / NS_PER_S, color=DECODE, height=0.8)
        title = "Requests: waiting for the first token (pale), streaming (dark)"
        axes.set(xlabel="seconds", ylabel="request", title=title)

    return draw


def _chunks(records: Sequence[RequestRecord]) -> Draw:
    start = min(record.intended for record in records)

    def draw(axes: Any) -> None:
        times = [(at - start) / NS_PER_S for record in records for at, _ in record.token_events()]
        axes.hist(times, bins=60, color=DECODE)
        axes.set(xlabel="seconds", ylabel="chunks received", title="Chunks over time")

    return draw
