"""The plot that only a bench of our own server has; the others are in `metrics.figures`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway.bench.server import SPLIT
from headway.metrics.figures import MAX_LANES, Draw
from headway.metrics.records import NS_PER_MS, TOKEN_KINDS, RequestRecord
from headway.report.figures import DECODE, LIMIT, PREFILL, STALLS, WAITS

COLOURS = (WAITS, PREFILL, DECODE, STALLS, LIMIT)  # of the server's parts, in SPLIT's order


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
