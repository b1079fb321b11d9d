"""The server's side of a run, where the endpoint is Headway: /metrics before and after it, and its event log.

    client  intended ------------------------------- first token ------------------------------------ last token
    server      |-- queue --|-- prefill (chunks) --------|-- own steps --|-- stall --|-- own steps --|

A stall is decode time in which no step held the request: it was preempted, or the loop did something else. Own steps
that also carried a prompt chunk of another request are counted apart: they are what mixing costs. The parts add up:

    end to end (client, end mark) = queue + prefill + alone + beside prompts + stalled + outside the engine

To the end mark, because the last step may make an end token that nobody sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headway.bench.client import BenchClient
from headway.bench.transport import ExchangeFailed
from headway.client.watch import parse
from headway.core.errors import BadInput
from headway.core.events import Admitted, AnyEvent, Finished, FirstToken, Preempted, Queued, StepDone
from headway.engine.event_file import EventFileError, read_events
from headway.metrics.records import NS_PER_MS, RequestRecord
from headway.metrics.stats import describe

PS_PER_MS, PS_PER_NS = 1_000_000_000, 1_000
SPLIT = {  # the parts that add up to the time in the engine, and what they are called
    "queue_ms": "queue", "prefill_ms": "prefill", "alone_ms": "decode, own steps",
    "beside_prompts_ms": "decode, beside prompts", "stalled_ms": "decode, stalled",
}  # fmt: skip
PARTS = {**SPLIT, "requeued_ms": "of these: waiting after a preemption"}
AROUND = {"unaccounted_ms": "outside, in all", "before_ms": "of this before the engine"}  # client, network, API process
CLOCK_MS = 1.0  # by which two readings of one clock may seem to run backwards
MEANS = ("request_queue_seconds", "request_prefill_seconds", "request_decode_seconds", "time_to_first_token_seconds")
COUNTERS = (
    "prefix_cache_queries_total", "prefix_cache_hits_total", "preemptions_total", "preempted_tokens_total",
    "generation_tokens_total", "steps_total", "step_seconds_total", "step_predicted_seconds_total",
    "step_prediction_error_seconds_total", "draft_tokens_total", "accepted_tokens_total",
)  # fmt: skip


class ServerSide(msgspec.Struct, kw_only=True):
    """One request as the server saw it.

    Attributes:
        queue_ms: from arrival to its first blocks.
        prefill_ms: from there to its first token.
        decode_ms: from there to its end = alone_ms (steps of its own without a prompt chunk) + beside_prompts_ms (with
            one) + stalled_ms (no step of its own).
        requeued_ms: of prefill and stalls, from preemptions to new blocks.
        cached: prompt tokens it did not have to compute; recomputed: tokens it had to compute again after preemptions,
            because they were no longer cached.
        arrived: when, in ns of the machine's clock.
    """

    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    alone_ms: float | None = None
    beside_prompts_ms: float | None = None
    stalled_ms: float | None = None
    requeued_ms: float = 0.0
    cached: int = 0
    recomputed: int = 0
    preemptions: int = 0
    arrived: int | None = None

    @property
    def engine_ms(self) -> float | None:
        """From arrival to end."""
        if self.queue_ms is None or self.prefill_ms is None or self.decode_ms is None:
            return None
        return self.queue_ms + self.prefill_ms + self.decode_ms


SERVER_COLUMNS = tuple(name for name in ServerSide.__struct_fields__ if name != "arrived")


class _Trail(msgspec.Struct):
    """What is remembered of a request, ps."""

    admitted: int | None = None
    waited: int = 0
    first: int | None = None
    ended: int | None = None
    own: int = 0  # decode time inside steps that computed it
    mixed: int = 0  # of that, in steps with a prompt chunk
    cached: int = 0
    lost: int = 0  # computed tokens whose blocks the last preemption took
    preempted: int = 0  # when that was
    requeued: int = 0
    recomputed: int = 0
    preemptions: int = 0

    def side(self) -> ServerSide:
        found = ServerSide(cached=self.cached, recomputed=self.recomputed, preemptions=self.preemptions)
        found.requeued_ms = self.requeued / PS_PER_MS
        if self.admitted is not None:
            found.queue_ms = self.waited / PS_PER_MS
            found.arrived = (self.admitted - self.waited) // PS_PER_NS
        if self.admitted is not None and self.first is not None:
            found.prefill_ms = (self.first - self.admitted) / PS_PER_MS
        if self.first is not None and self.ended is not None:
            decode = self.ended - self.first
            found.decode_ms = decode / PS_PER_MS
            found.alone_ms = (self.own - self.mixed) / PS_PER_MS
            found.beside_prompts_ms = self.mixed / PS_PER_MS
            found.stalled_ms = (decode - self.own) / PS_PER_MS
        return found


def fold_events(events: Iterable[AnyEvent]) -> dict[str, ServerSide]:
    """Every request of a log by its id."""
    trails: dict[str, _Trail] = {}
    ids: dict[int, str] = {}
    for event in events:
        if isinstance(event, Queued):
            trails[event.id] = _Trail()
            ids[event.number] = event.id
        elif isinstance(event, StepDone):
            _step(event, [trails[ids[row]] for row in event.rows if row in ids])
        elif isinstance(event, (Admitted, FirstToken, Preempted, Finished)) and event.id in trails:
            _transition(event, trails[event.id])
    return {id: trail.side() for id, trail in trails.items()}


def _transition(event: Admitted | FirstToken | Preempted | Finished, trail: _Trail) -> None:
    if isinstance(event, Admitted):
        if trail.admitted is None:
            trail.admitted, trail.waited, trail.cached = event.now, event.waited, event.cached
        else:
            trail.requeued += event.now - trail.preempted
            trail.recomputed += max(0, trail.lost - event.cached)
    elif isinstance(event, FirstToken):
        trail.first = event.now
    elif isinstance(event, Preempted):
        trail.preemptions += 1
        trail.lost, trail.preempted = event.wasted, event.now
    else:
        trail.ended = event.now


def _step(event: StepDone, rows: Sequence[_Trail]) -> None:
    """Decode time of each row inside this step. First tokens and ends of a step come before it in the log."""
    columns = zip(event.counts, event.emitted, strict=True)
    chunk = any(count > 1 and (not emitted or not event.drafted) for count, emitted in columns)
    for trail in rows:
        if trail.first is None:
            continue
        end = event.now if trail.ended is None else min(event.now, trail.ended)
        inside = max(0, end - max(event.planned, trail.first))
        trail.own += inside
        trail.mixed += inside if chunk else 0


def read_log(path: Path) -> tuple[dict[str, ServerSide], str | None]:
    """The requests of an event log, and what is wrong with its end: a running server may be in the middle of a line.

    Raises:
        BadInput: no such file, or not an event log.
    """
    found: list[AnyEvent] = []
    try:
        for event in read_events(path):
            found.append(event)
    except OSError as error:
        raise BadInput("--event-log", f"cannot read {path}: {error.strerror}") from None
    except EventFileError as error:
        if not found:
            raise BadInput("--event-log", str(error)) from None
        return fold_events(found), str(error)
    return fold_events(found), None


def parse_metrics(text: str) -> dict[str, float]:
    """Headway's series of a Prometheus text, labels summed up, buckets left out."""
    values = parse(text, at=0.0).values
    return {name.removeprefix("headway:"): value for name, value in values.items() if name.startswith("headway:")}


async def scrape(client: BenchClient) -> dict[str, float] | None:
    """Headway's metrics now; None if the endpoint has none, because it is something else."""
    try:
        status, body = await client.get(client.endpoint.root("/metrics"))
        found = parse_metrics(body.decode(errors="replace")) if status == 200 else {}
    except (ExchangeFailed, ValueError):
        return None
    return found or None


def metrics_between(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """What the run added to the counters, and mean seconds per request from the histograms' sums."""

    def grown(name: str) -> float:
        return round(after.get(name, 0.0) - before.get(name, 0.0), 9)

    found: dict[str, Any] = {name: grown(name) for name in COUNTERS if name in after}
    for name in MEANS:
        count = grown(f"{name}_count")
        found[f"mean_{name}"] = grown(f"{name}_sum") / count if count else None
    return found


def server_report(records: Sequence[RequestRecord], sides: Mapping[str, ServerSide]) -> dict[str, Any]:
    """The log's side of the measured requests: distributions of each part, sums of tokens, each request's split.

    `outside_ms` is the time to first token that the log does not know of: the network, the API process, the way into
    the engine. `unaccounted_ms` is the same of the whole request, to its end mark: `before_ms`, until it arrived in the
    engine, and the rest from the engine's last token on.
    """
    matched = {r.index: side for r in records if not r.warmup and (side := side_of(r, sides)) is not None}
    nothing = "no request of the run is in the event log"
    split = {r.index: _split(r, matched[r.index]) for r in records if r.index in matched}
    found: dict[str, Any] = {"matched": len(matched)}
    for part in (*PARTS, *AROUND, "decode_ms", "outside_ms"):
        values = [value for row in split.values() if (value := row[part]) is not None]
        found[part] = describe(values, nothing)
    for name in ("cached", "recomputed", "preemptions"):
        found[name] = sum(getattr(side, name) for side in matched.values())
    found["requests"] = {str(index): row for index, row in split.items()}
    return found


def _split(record: RequestRecord, side: ServerSide) -> dict[str, Any]:
    """One request: the server's parts, and what the client saw beside them."""
    to_first = None if side.queue_ms is None or side.prefill_ms is None else side.queue_ms + side.prefill_ms
    row: dict[str, Any] = {name: getattr(side, name) for name in SERVER_COLUMNS}
    row["outside_ms"] = _less(record.ttft_ms, to_first)
    row["unaccounted_ms"] = _less(record.e2e_done_ms, side.engine_ms)
    before, outside = None, row["unaccounted_ms"]
    if side.arrived is not None and outside is not None:
        before = (side.arrived - record.intended) / NS_PER_MS
        if not -CLOCK_MS < before < outside + CLOCK_MS:  # the clock is another machine's
            before = None
    return row | {"before_ms": before, "e2e_done_ms": record.e2e_done_ms}


def _less(whole: float | None, part: float | None) -> float | None:
    return None if whole is None or part is None else round(whole - part, 6)


def side_of(record: RequestRecord, sides: Mapping[str, ServerSide]) -> ServerSide | None:
    """The server calls a request by its answer's id and the number of the prompt in it."""
    return None if record.server_id is None else sides.get(f"{record.server_id}-0") or sides.get(record.server_id)


def server_values(sides: Mapping[str, ServerSide]) -> Callable[[RequestRecord], Sequence[object]]:
    """Of a record, what goes under `SERVER_COLUMNS`."""

    def values(record: RequestRecord) -> Sequence[object]:
        side = side_of(record, sides)
        return [getattr(side, name, None) for name in SERVER_COLUMNS]

    return values
