"""What an event log says was served: its requests as a trace, and their times as they were measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from headway.core.clock import to_seconds
from headway.core.errors import BadInput
from headway.core.events import Finished, FirstToken, Queued, Refused
from headway.engine.event_file import read_events, read_header
from headway.metrics.records import Chunk, Failure, FailureKind, Kind, RequestRecord
from headway.metrics.run import Run
from headway.traffic.load import Load
from headway.traffic.traces import TraceRow

PS_PER_NS = 1000


def recorded(path: Path) -> list[TraceRow]:
    """The answered requests of an event log: prompts are equal where the names of their blocks are.

    Raises:
        EventFileError: it is none.
    """
    size = read_header(path).limits.block_size
    queued: dict[str, Queued] = {}
    rows: list[TraceRow] = []
    numbers: dict[bytes, int] = {}
    for event in read_events(path):
        if isinstance(event, Queued):
            queued[event.id] = event
        elif isinstance(event, Finished) and event.id in queued:
            came = queued.pop(event.id)
            if event.generated:
                blocks = tuple(numbers.setdefault(name, len(numbers)) for name in came.names)
                rows.append(TraceRow(to_seconds(came.now), came.prompt_tokens, event.generated, blocks, size))
    if not rows:
        raise BadInput("--log", f"{path} holds no answered request")
    start = min(row.at for row in rows)
    return sorted((replace(row, at=row.at - start) for row in rows), key=lambda row: row.at)


def measured(path: Path) -> Run:
    """The requests of an event log as records, with the engine's own times: a first and a last token each."""
    queued: dict[str, Queued] = {}
    firsts: dict[str, int] = {}
    records: list[RequestRecord] = []
    for event in read_events(path):
        match event:
            case Queued():
                queued[event.id] = event
            case FirstToken():
                firsts[event.id] = event.now
            case Finished() if event.id in queued:
                records.append(_record(len(records), queued.pop(event.id), firsts.pop(event.id, None), event))
            case Refused():
                at = 1 + event.now // PS_PER_NS
                failure = Failure(FailureKind.HTTP, event.reason)
                records.append(RequestRecord(index=len(records), intended=at, sent=at, ended=at, max_tokens=1,
                                             failure=failure))  # fmt: skip
            case _:
                pass
    return Run(Load("trace"), records)


def _record(index: int, came: Queued, first: int | None, ended: Finished) -> RequestRecord:
    at, end = 1 + came.now // PS_PER_NS, 1 + ended.now // PS_PER_NS
    chunks = []
    if first is not None:
        chunks = [Chunk(1 + first // PS_PER_NS, Kind.CONTENT, 0, 1)]
        if ended.generated > 1:
            chunks.append(Chunk(end, Kind.CONTENT, 1, ended.generated - 1))
    failed = ended.reason in ("abort", "error")
    return RequestRecord(
        index=index, intended=at, sent=at, ended=end, max_tokens=came.max_len - came.prompt_tokens, chunks=chunks,
        prompt_tokens=ended.prompt_tokens, output_tokens=ended.generated, cached_tokens=ended.cached,
        finish_reason=ended.reason, failure=Failure(FailureKind.SLOW, ended.reason) if failed else None,
    )  # fmt: skip
