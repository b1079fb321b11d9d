"""Synthetic records of known timing, for tests that need no socket."""

from __future__ import annotations

from headway.metrics.records import NS_PER_MS, Chunk, Failure, FailureKind, Kind, RequestRecord
from headway.metrics.run import Run
from headway.traffic.load import Load

START = 1_000_000_000


def record(
    first_ms: float = 200.0,
    gap_ms: float = 30.0,
    chunks: int = 101,
    tokens: int | None = 301,
    *,
    late_ms: float = 0.0,
    at_ms: float = 0.0,
    role_ms: float | None = None,
    prompt: int | None = 50,
    cached: int | None = None,
    index: int = 0,
    told: int = 0,
    reasoning: int = 0,
    finish: bool = False,
) -> RequestRecord:
    """First token after `first_ms`, then `chunks - 1` more every `gap_ms`; usage 5 ms and [DONE] 6 ms after the last.

    Sent `late_ms` after the intended start, which is `at_ms` into the run.
    """
    intended = START + round(at_ms * NS_PER_MS)

    def at(ms: float) -> int:
        return intended + round(ms * NS_PER_MS)

    found = RequestRecord(index=index, intended=intended, sent=at(late_ms), max_tokens=4096, prompt_wanted=prompt or 0)
    if role_ms is not None:
        found.chunks.append(Chunk(at(role_ms), Kind.ROLE, 1000))
    last = first_ms + gap_ms * (chunks - 1)
    for number in range(chunks):
        kind = Kind.REASONING if number < reasoning else Kind.CONTENT
        found.chunks.append(Chunk(at(first_ms + gap_ms * number), kind, number, told))
    if finish:
        found.chunks.append(Chunk(at(last), Kind.FINISH, 2000))
    found.chunks.append(Chunk(at(last + 5), Kind.USAGE, 2001))
    found.chunks.append(Chunk(at(last + 6), Kind.DONE, 2002))
    found.ended = at(last + 6)
    found.prompt_tokens, found.output_tokens, found.cached_tokens = prompt, tokens, cached
    found.finish_reason = "stop"
    return found


def failed(kind: FailureKind = FailureKind.HTTP, at_ms: float = 0.0, index: int = 0) -> RequestRecord:
    intended = START + round(at_ms * NS_PER_MS)
    return RequestRecord(
        index=index,
        intended=intended,
        sent=intended,
        ended=intended + 1,
        max_tokens=64,
        failure=Failure(kind, "it failed"),
    )


def run_of(*records: RequestRecord, load: Load | None = None) -> Run:
    return Run(load or Load("constant", rate=1.0), list(records))
