"""What a simulation leaves behind: a record per request, as `headway bench` keeps them, and the system over time."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from headway.core.clock import to_seconds
from headway.core.errors import Rejected
from headway.core.step import StepPlan
from headway.metrics.records import Chunk, Failure, FailureKind, Kind, RequestRecord
from headway.scheduling.state import Emission
from headway.simulate.driver import SimulatedReplica
from headway.simulate.workload import Ask

PS_PER_NS = 1000
DETAIL = 1_000_000  # tokens whose times are kept one by one; of answers after these, first and last token
SAMPLES = 512  # points of a series, at most
PARTS = ("queue", "prefill", "decode")


class Track(msgspec.Struct):
    """A live request. Times are ps; -1 = not yet."""

    ask: Ask
    taken: int = -1
    admitted: int = -1
    first: int = -1
    last: int = -1
    tokens: int = 0
    times: array[int] | None = None


class Samples:
    """Figures over time: a sample per interval, which doubles when there are too many samples."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.samples: list[tuple[float, ...]] = []  # (seconds, a figure per name)
        self._every = 1e-3
        self._next = 0.0

    @property
    def due(self) -> float:
        """When the next sample is, seconds."""
        return self._next

    def wants(self, seconds: float) -> bool:
        """Is a sample due?"""
        return seconds >= self._next

    def add(self, seconds: float, *figures: float) -> None:
        self.samples.append((seconds, *figures))
        self._next = seconds + self._every
        if len(self.samples) >= 2 * SAMPLES:
            del self.samples[1::2]
            self._every *= 2

    def column(self, name: str) -> list[list[float]]:
        """[seconds, figure] pairs."""
        index = 1 + self.names.index(name)
        return [[round(sample[0], 6), sample[index]] for sample in self.samples]


class Trail:
    """An observer that keeps records, integrals of how many requests are in each part, and series.

    Attributes:
        records: of ended requests, in order of their ends.
        counts: requests that arrived, finished, were refused or aborted.
        inside: how many are in each part now; areas: integrals of these over time, request-ps; spent: ps that ended
            requests spent in each part.
        steps, step_tokens, step_rows: steps taken, those leapt over included, and new tokens and rows over all of them.
    """

    def __init__(self, detail: int = DETAIL) -> None:
        self.records: list[RequestRecord] = []
        self.counts = {"arrived": 0, "finished": 0, "refused": 0, "aborted": 0}
        self.inside = dict.fromkeys(PARTS, 0)
        self.areas = dict.fromkeys(PARTS, 0)
        self.spent = dict.fromkeys(PARTS, 0)
        self.preemptions = self.steps = self.step_tokens = self.step_rows = 0
        self.series = Samples(("waiting", "running", "batch", "kv_use", "kv_filled"))
        self._detail = detail
        self._tracks: dict[str, Track] = {}
        self._now = 0
        self.begin: int | None = None

    def close(self, end: int) -> None:
        """Nothing more happens until `end`."""
        self._pass(end)

    @property
    def seconds(self) -> float:
        """From the first arrival to now."""
        return to_seconds(self._now - (self.begin or 0))

    def mean(self, part: str) -> float:
        """Mean number of requests in a part."""
        seconds = self._now - (self.begin or 0)
        return self.areas[part] / seconds if seconds else 0.0

    def count(self, steps: int, tokens: int, rows: int, end: int) -> None:
        """So many steps, until `end`, with so many new tokens and rows in all."""
        self.steps += steps
        self.step_tokens += tokens
        self.step_rows += rows
        self._now = max(self._now, end)

    def arrived(self, ask: Ask) -> None:
        self._pass(ask.at)
        if self.begin is None:
            self.begin = self._now = ask.at
        self.counts["arrived"] += 1
        self.inside["queue"] += 1
        times = array("q") if ask.output <= self._detail else None
        self._detail -= ask.output if times is not None else 0
        self._tracks[str(ask.number)] = Track(ask, times=times)

    def taken(self, id: str, now: int) -> None:
        self._tracks[id].taken = now

    def refused(self, ask: Ask, error: Rejected, now: int) -> None:
        self._pass(now)
        self.counts["refused"] += 1
        track = self._tracks.pop(str(ask.number))
        self._leave(track, now)
        self.records.append(self._record(track, now, Failure(FailureKind.HTTP, str(error))))

    def planned(self, replica: SimulatedReplica, plans: Sequence[StepPlan], now: int) -> None:
        self._pass(now)
        tokens = rows = 0
        for plan in plans:
            for row in plan.new:
                track = self._tracks[row.id]
                if track.admitted < 0:
                    track.admitted = now
                    self._move("queue", "prefill")
            rows += len(plan.work)
            tokens += sum([work.count for work in plan.work])
        self._count(1, tokens, rows)
        seconds = to_seconds(now - (self.begin or 0))
        if self.series.wants(seconds):
            waiting, running = self.inside["queue"], self.inside["prefill"] + self.inside["decode"]
            self.series.add(seconds, waiting, running, rows, *_kv_use(replica))

    def repeated(self, plan: StepPlan, more: int) -> None:
        self._count(more, sum([work.count for work in plan.work]), len(plan.work))

    def _count(self, steps: int, tokens: int, rows: int) -> None:
        self.steps += steps
        self.step_tokens += steps * tokens
        self.step_rows += steps * rows

    def emitted(self, emission: Emission, times: Sequence[int]) -> None:
        now = times[-1]
        self._pass(now)
        track = self._tracks[emission.request.id]
        if emission.tokens:
            if track.first < 0:
                track.first = times[0]
                self._move("prefill", "decode")
                self.areas["prefill"] -= now - times[0]  # the steps after it were counted there
                self.areas["decode"] += now - times[0]
            track.last = now
            track.tokens += len(emission.tokens)
            if track.times is not None:
                track.times.extend(times)
        if emission.finish is None:
            return
        del self._tracks[emission.request.id]
        self._leave(track, now)
        failure = None
        if emission.finish.reason in ("abort", "error"):
            self.counts["aborted"] += 1
            failure = Failure(FailureKind.SLOW, str(emission.finish.matched))
        else:
            self.counts["finished"] += 1
        record = self._record(track, now, failure)
        record.cached_tokens = emission.request.cached
        record.finish_reason = emission.finish.reason
        self.preemptions += emission.request.preemptions
        self.records.append(record)

    def _pass(self, now: int) -> None:
        gone = now - self._now
        if gone:
            for part, count in self.inside.items():
                self.areas[part] += count * gone
            self._now = now

    def _move(self, before: str, after: str) -> None:
        self.inside[before] -= 1
        self.inside[after] += 1

    def _leave(self, track: Track, now: int) -> None:
        """An ended request spent its time: in the queue until it was admitted, and so on."""
        ends = (track.admitted, track.first, now)
        reached = [end for end in ends if end >= 0]
        edges = [track.ask.at, *reached[:-1], now]
        for part, start, end in zip(PARTS, edges, edges[1:], strict=False):
            self.spent[part] += end - start
        self.inside[PARTS[len(edges) - 2]] -= 1

    def _record(self, track: Track, now: int, failure: Failure | None) -> RequestRecord:
        ask = track.ask
        chunks = chunks_of(track.first, track.last, track.tokens, track.times)
        return record(ask.number, ask.at, len(ask.prompt), ask.most or ask.output, chunks, track.tokens, now, failure)


def chunks_of(first: int, last: int, tokens: int, times: Sequence[int] | None) -> list[Chunk]:
    """What a client saw of an answer: all tokens at their times, or the first, and the others with the last."""
    if times is not None:
        return [Chunk(_ns(at), Kind.CONTENT, index, 1) for index, at in enumerate(times)]
    if not tokens:
        return []
    begin = Chunk(_ns(first), Kind.CONTENT, 0, 1)
    return [begin] if tokens == 1 else [begin, Chunk(_ns(last), Kind.CONTENT, 1, tokens - 1)]


def record(
    number: int, at: int, prompt: int, most: int, chunks: list[Chunk], tokens: int, ended: int,
    failure: Failure | None,
) -> RequestRecord:  # fmt: skip
    """An ended request as `headway bench` keeps it. Times are ps; `prompt` in tokens."""
    begin = _ns(at)
    return RequestRecord(
        index=number, intended=begin, max_tokens=most, prompt_wanted=prompt, sent=begin, ended=_ns(ended),
        chunks=chunks, prompt_tokens=prompt, output_tokens=tokens, failure=failure,
    )  # fmt: skip


def _ns(ps: int) -> int:
    """From 1, for 0 means that it did not happen."""
    return 1 + ps // PS_PER_NS


def _kv_use(replica: SimulatedReplica) -> tuple[float, float]:
    size = owned = filled = 0
    for scheduler in replica.schedulers:
        pool = scheduler.cache.pools[0]
        size += pool.size
        owned += pool.size - pool.available
        filled += sum(row.request.computed for row in scheduler.state.running)
    return kv_shares(owned, filled, size, replica.schedulers[0].cache.block_size)


def kv_shares(owned: int, filled: int, size: int, block_size: int) -> tuple[float, float]:
    """(share of the blocks that somebody owns, share of their places that hold computed tokens), of the first group."""
    return round(owned / size, 4), round(filled / (size * block_size), 4)
