"""Plain loads, many times faster: the scheduler's decisions in C++ (ops/native/src/replica.h), equal to the picosecond.

A load is plain where nothing but lengths, arrivals and room can matter: one class of requests, one pool of blocks that
are only counted, a step sized in tokens and without noise, the policy `chunked` or `fcfs`. With a prefix
cache too, as long as no two requests share anything and nobody is preempted: then nothing is ever found in it. The
scheduler itself (`driver.py`) plays everything else, and all on a machine without the native module; a test holds the
two equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from headway.core.clock import PS_PER_SECOND, to_ps, to_seconds
from headway.core.errors import Rejected
from headway.core.step import StepShape
from headway.metrics.records import Failure, FailureKind
from headway.ops import native
from headway.roofline.step import StepTime
from headway.scheduling.policies import policy_named
from headway.scheduling.policies.chunked import CHUNKED
from headway.scheduling.policies.fcfs import FCFS
from headway.simulate.arrivals import Arrivals, Closed, Columns
from headway.simulate.deploy import Deployed
from headway.simulate.driver import Source
from headway.simulate.trail import PARTS, Samples, Trail, chunks_of, kv_shares, record
from headway.simulate.workload import Answers, check_prompt, of_row

NEVER = (1 << 62) - 1  # ps
COLUMNS = ("at", "admitted", "first", "last", "tokens", "ended", "preemptions", "how")
REFUSED, STOP, LENGTH = range(3)  # how a request ended
REASONS = {STOP: "stop", LENGTH: "length"}
Progress = Callable[[int], None]


def play_plain(
    deployed: Deployed, source: Source, replicas: int, in_turn: bool, detail: int, progress: Progress
) -> tuple[Trail, int] | None:
    """What `run` does with a load, if it is plain.

    Args:
        in_turn: replicas take requests in turn, so that none depends on another.
        detail: tokens whose times are kept one by one.

    Returns what happened, and ps of all steps; None: it must be played by the scheduler itself.
    """
    columns = source.columns if isinstance(source, Arrivals | Closed) else None
    if columns is None or not _plain(deployed, columns, replicas, in_turn):
        return None
    load = _Load(deployed, columns, detail)
    trail, busy, found = Trail(), 0, _Found(len(columns.rows))
    prices = native.load().StepPrices(*prices_of(deployed))
    for number in range(min(replicas, len(columns.rows))):
        chosen = slice(number, None, replicas)
        begin = columns.at[0]
        look = _Look(deployed, trail.series, begin, progress) if number == 0 else lambda *_: NEVER
        try:
            one = native.load().play(_setup(deployed), **load.columns(chosen), prices=prices, look=look)
        except OverflowError:  # the scheduler itself says what is wrong
            return None
        if deployed.setup.prefix_cache and one["preemptions"].any():
            return None
        steps, tokens, rows, worked, end = one["totals"]
        trail.count(steps, tokens, rows, end)
        busy += worked
        found.take(chosen, one)
        progress(round(len(columns.rows) * (number + 1) / replicas))
    if replicas > 1:
        found.join(trail.series, columns.at[0])
    found.fill(trail, load)
    return trail, busy


def available() -> bool:
    """Whether the native module is there, and not one that was built before it could."""
    return native.available() and hasattr(native.load(), "StepPrices")


def _plain(deployed: Deployed, columns: Columns, replicas: int, in_turn: bool) -> bool:
    limits, setup, rows = deployed.limits, deployed.setup, columns.rows
    scheduler = (
        policy_named(setup.policy) in (CHUNKED, FCFS) and setup.max_wait is None
        and deployed.budget.milliseconds is None and not deployed.noise and limits.max_in_flight == 1
        and limits.long_after is None and limits.windows == (None,)
    )  # fmt: skip
    alone = replicas == 1 or (in_turn and len(columns.at) == len(rows))
    apart = not setup.prefix_cache or not (columns.shared or any(row.blocks for row in rows))
    in_order = all(map(int.__le__, columns.at, columns.at[1:]))
    soon = bool(rows) and max(columns.at[-1], columns.think) < NEVER
    return scheduler and alone and apart and in_order and soon and available()


def _setup(deployed: Deployed) -> Any:
    limits, budget, policy = deployed.limits, deployed.budget, policy_named(deployed.setup.policy)
    most = min(limits.max_tokens_per_step, budget.tokens or limits.max_tokens_per_step)
    return native.load().ReplicaSetup(
        block_size=limits.block_size, blocks=limits.blocks[0], max_rows=limits.max_rows,
        max_tokens_per_step=limits.max_tokens_per_step, max_model_len=limits.max_model_len, step_tokens=most,
        prompt_tokens=round(most * budget.least), shortest_first=policy is CHUNKED, headroom=policy.headroom,
        strict_after=-1 if policy.strict_after is None else policy.strict_after,
        idle_step=to_ps(deployed.host_seconds),
    )  # fmt: skip


def prices_of(deployed: Deployed) -> tuple[Callable[..., int], Callable[[int, int, int], np.ndarray] | None]:
    """How long a step takes, ps, by the one step-time model; and how long steps take in which each of `rows` rows has
    one new token, int64 of `count` steps that read `first` and more keys. That model has room for arrays, if no query's
    keys are limited."""
    model, host = deployed.model, deployed.host_seconds
    predict = model.predict

    def ask(tokens: int, rows: int, logits: int, keys: int, pairs: int, decode_keys: int) -> int:
        decodes = (decode_keys,)
        return to_ps(predict(StepShape(tokens, rows, logits, (keys,), (pairs,), decodes, decodes)) + host)

    def steady(rows: int, first: int, count: int) -> np.ndarray:
        keys: Any = (np.arange(first, first + count),)
        seconds: Any = predict(StepShape(rows, rows, rows, keys, keys, keys, keys)) + host
        return np.rint(seconds * PS_PER_SECOND).astype(np.int64)

    limited = not isinstance(model, StepTime) or any(cache.limit is not None for cache in model.amounts.caches)
    return ask, None if limited else steady


class _Look:
    """Samples the series of a replica."""

    def __init__(self, deployed: Deployed, series: Samples, begin: int, progress: Progress) -> None:
        self._limits = deployed.limits
        self._series = series
        self._begin = begin
        self._progress = progress

    def __call__(self, now: int, ended: int, waiting: int, running: int, rows: int, owned: int, computed: int) -> int:
        limits, seconds = self._limits, to_seconds(now - self._begin)
        if self._series.wants(seconds):
            shares = kv_shares(owned, computed, limits.blocks[0], limits.block_size)
            self._series.add(seconds, waiting, running, rows, *shares)
            self._progress(ended)
        return min(NEVER, self._begin + to_ps(self._series.due) - 1)  # it may be a rounding early


class _Load:
    """The columns of a load."""

    def __init__(self, deployed: Deployed, columns: Columns, detail: int) -> None:
        rows, limits = columns.rows, deployed.limits
        for row in rows:
            check_prompt(row.input_tokens)
        self._think = columns.think
        self.most = columns.most
        self.at = np.array(columns.at, np.int64)
        self.prompt = np.array([row.input_tokens for row in rows], np.int64)
        self.output = np.array([row.output_tokens for row in rows], np.int64)
        longest = np.full(len(rows), limits.max_model_len, np.int64)
        self.max_len = longest if columns.most is None else self.prompt + columns.most
        self.detailed = np.zeros(len(rows), np.uint8)
        for index, row in enumerate(rows):
            if row.output_tokens <= detail:
                self.detailed[index] = 1
                detail -= row.output_tokens
        self.problems = self._problems(deployed, columns)

    def _problems(self, deployed: Deployed, columns: Columns) -> dict[int, str]:
        """What the scheduler says of those that it can never serve."""
        limits = deployed.limits
        room = min(limits.max_model_len, limits.blocks[0] * limits.block_size)
        doubtful = np.flatnonzero((self.prompt >= self.max_len) | (self.max_len > room))
        found: dict[int, str] = {}
        (scheduler,) = deployed.replica(Answers()).schedulers if len(doubtful) else (None,)
        for index in map(int, doubtful):
            assert scheduler is not None
            ask = of_row(index, columns.rows[index])
            ask.most = columns.most
            try:
                scheduler.add(ask.request(limits.max_model_len))
                scheduler.cancel(str(index), 0)
            except Rejected as error:
                found[index] = str(error)
        return found

    def columns(self, chosen: slice) -> dict[str, Any]:
        """Of some requests, as the native module wants them."""
        refused = np.zeros(len(self.prompt), np.uint8)
        refused[list(self.problems)] = 1
        names: dict[str, np.ndarray] = {
            "at": self.at, "prompt": self.prompt, "output": self.output, "max_len": self.max_len, "refused": refused,
            "detailed": self.detailed,
        }  # fmt: skip
        cut = {name: np.ascontiguousarray(column[chosen]) for name, column in names.items()}
        return cut | {"open": len(cut["at"]), "think": self._think}


class _Found:
    """What happened to each request, of all replicas."""

    def __init__(self, count: int) -> None:
        self._columns = {name: np.zeros(count, np.int64) for name in COLUMNS}
        self._times: list[Any] = [()] * count

    def take(self, chosen: slice, one: dict[str, Any]) -> None:
        """A replica's share."""
        for name, column in self._columns.items():
            column[chosen] = one[name]
        self._times[chosen] = one["times"]

    def join(self, series: Samples, begin: int) -> None:
        """Of several replicas: who is inside is counted over all of them; the step is that of the first one."""
        at, ended = self._columns["at"], np.sort(self._columns["ended"])
        left_queue = np.sort(
            np.where(self._columns["admitted"] >= 0, self._columns["admitted"], self._columns["ended"])
        )
        moments = np.array([begin + to_ps(sample[0]) for sample in series.samples], np.int64)
        came, began, over = (np.searchsorted(times, moments, "right") for times in (at, left_queue, ended))
        series.samples = [
            (sample[0], int(waiting), int(running), *sample[3:])
            for sample, waiting, running in zip(series.samples, came - began, began - over, strict=True)
        ]

    def fill(self, trail: Trail, load: _Load) -> None:
        """The records, counts and integrals that an observer of every step would have."""
        found = self._columns
        refused, at = found["how"] == REFUSED, found["at"]
        trail.begin = int(at[0])
        admitted = np.where(refused, found["ended"], found["admitted"])
        first = np.where(refused, found["ended"], found["first"])
        edges = (at, admitted, first, found["ended"])
        for part, begin, end in zip(PARTS, edges, edges[1:], strict=False):
            trail.spent[part] = trail.areas[part] = _sum(end - begin)
        trail.preemptions = int(found["preemptions"].sum())
        trail.counts |= {"arrived": len(at), "refused": int(refused.sum()), "finished": int((~refused).sum())}
        columns = [found[name].tolist() for name in ("at", "first", "last", "tokens", "ended", "how")]
        lengths = load.prompt.tolist(), load.output.tolist(), load.detailed.tolist()
        for number, (came, begin, last, tokens, end, how, prompt, output, detailed) in enumerate(
            zip(*columns, *lengths, strict=True)
        ):
            chunks = chunks_of(begin, last, tokens, self._times[number].tolist() if detailed else None)
            problem = load.problems.get(number)
            failure = None if problem is None else Failure(FailureKind.HTTP, problem)
            one = record(number, came, prompt, load.most or output, chunks, tokens, end, failure)
            if how != REFUSED:
                one.cached_tokens, one.finish_reason = 0, REASONS[how]
            trail.records.append(one)


def _sum(values: np.ndarray) -> int:
    """Of int64 values, beyond 64 bits."""
    return (int((values >> 32).sum()) << 32) + int((values & 0xFFFFFFFF).sum())
