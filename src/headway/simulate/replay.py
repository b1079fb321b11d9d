"""A recorded run played again: the same scheduler, fed what it was fed, must plan the same steps.

The recording has no tokens, but it has the names of full blocks. Tokens are made up from them: equal names, equal
tokens; different names, different tokens. So prefix hits happen again where they happened, and nothing is disclosed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from headway.cache.hashing import BlockHasher
from headway.core.errors import BadInput, HeadwayError
from headway.core.events import (
    MOST_TOKENS,
    AnyEvent,
    BlocksAwaited,
    BlocksLoaded,
    Cancelled,
    ExecutorReset,
    Finished,
    Header,
    Idle,
    Queued,
    Regime,
    StepDone,
    StepPlanned,
)
from headway.core.request import Finish, Request, SamplingParams
from headway.core.step import Capabilities, StepPlan, StepResult
from headway.engine.event_file import EventFileError, read_events, read_header
from headway.roofline.fixed import FixedCosts
from headway.scheduling.budget import Budget, StepTimeModel
from headway.scheduling.digest import digest_of
from headway.scheduling.policies import policy_named
from headway.scheduling.scheduler import Scheduler

MOST_BLOCKS = 1 << 24  # of all pools
MOST_BLOCK = 1 << 10  # tokens
MOST_UNNAMED = 1 << 25  # tokens that no name in the file stands for
MOST_PROPOSED = 1 << 20  # tokens, in one step


class Difference(msgspec.Struct, frozen=True):
    """The first step that was planned differently, and the plan made now."""

    step: int
    plan: StepPlan


class Replayed(msgspec.Struct, frozen=True):
    """Outcome of a replay: steps planned alike, and the first that was not (None = all were)."""

    steps: int
    difference: Difference | None


def _stand_in(name: bytes) -> int:
    """The token that fills a block of this name."""
    return -1 - (int.from_bytes(name[:8], "little") >> 1)


class NamesOfTokens(BlockHasher):
    """Names made-up blocks by their token alone, which stands for the recorded name and so for all that came before.
    A block of the cache that the recording began with has only that name, and must be found by it."""

    def name(self, parent: bytes, payload: bytes) -> bytes:
        return payload[:8]

    def recorded(self, name: bytes) -> bytes:
        """The name, here, of a block that had this one when it was recorded."""
        return self.pack([_stand_in(name)] * self.block_size)[:8]


def _check(fits: bool, problem: str) -> None:
    if not fits:
        raise ValueError(problem)


class Recording:
    """An event file in memory, with made-up tokens for each of its requests."""

    def __init__(self, path: Path) -> None:
        self.header: Header = read_header(path)
        if self.header.midway:
            raise EventFileError(f"{path}: it begins in the middle of requests, so it cannot be replayed")
        limits = self.header.limits
        for field, claimed, most in (
            ("blocks", sum(limits.blocks), MOST_BLOCKS),
            ("block_size", limits.block_size, MOST_BLOCK),
            ("max_model_len", limits.max_model_len, MOST_TOKENS),
        ):
            if claimed > most:
                raise EventFileError(f"{path}, line 1: limits.{field}: {claimed} is more than {most}")
        self._path = path
        self._unnamed = 0
        self._emitted: Counter[int] = Counter()  # by request number
        self.events: list[AnyEvent] = list(read_events(path))
        self.steps: dict[int, StepDone] = {}
        self.digests: dict[int, bytes] = {}
        self.queued: dict[int, Queued] = {}  # by request number
        self.tokens: dict[int, list[int]] = {}  # prompt and answer
        self.ends: dict[int, list[Finished]] = {}  # step -> requests that ended with it
        self._live: dict[str, int] = {}  # id -> number; an id may come again after its request has finished
        self._flying: deque[int] = deque()  # steps in flight
        for line, event in enumerate(self.events, start=2):
            with self.fitting(line):
                self._read(event)
        for number in self._live.values():  # their answers have no names yet: nobody can have reused them
            queued = self.queued[number]
            with self.fitting(len(self.events) + 1):
                length = queued.prompt_tokens + self._emitted[number]
                self.tokens[number] = self._made_up(number, queued.names, min(length, queued.max_len))

    @contextmanager
    def fitting(self, line: int) -> Iterator[None]:
        """Whatever is wrong with a line shows where it is used, in any way; here that becomes a sentence."""
        try:
            yield
        except (Differs, EventFileError):
            raise
        except Exception as error:
            why = str(error) if isinstance(error, (HeadwayError, ValueError)) else ""
            problem = "" if line == 1 and why else "does not fit the lines before it: "
            raise EventFileError(f"{self._path}, line {line}: {problem}{why or type(error).__name__}") from error

    def _read(self, event: AnyEvent) -> None:
        match event:
            case Queued():
                _check(event.number not in self.queued, "number: it is another request's")
                _check(event.prompt_tokens <= event.max_len <= self.header.limits.max_model_len, "max_len")
                self._live[event.id] = event.number
                if event.parent is not None and not event.names:  # a choice has the prompt of its parent
                    _check(event.parent in self._live, "parent: no request has this id")
                    names = self.queued[self._live[event.parent]].names
                    event = msgspec.structs.replace(event, names=names)
                self.queued[event.number] = event
            case StepPlanned():
                self._flying.append(event.step)
                self.digests[event.step] = event.digest
            case StepDone():
                _check(event.step in self._flying, "step: it was not planned")
                _check(
                    len(event.rows) == len(event.counts) == len(event.emitted), "rows, counts, emitted: as many each"
                )
                _check(all(number in self.queued for number in event.rows), "rows: no request has this number")
                _check(sum(event.proposed) <= MOST_PROPOSED, "proposed")
                self._flying.remove(event.step)
                self.steps[event.step] = event
                for number, count in zip(event.rows, event.emitted, strict=True):
                    self._emitted[number] += count
            case Finished():
                _check(event.id in self._live, "id: no request has it")
                number = self._live.pop(event.id)
                length = event.prompt_tokens + event.generated
                _check(length <= self.queued[number].max_len, "prompt_tokens, generated: more than its max_len")
                self.tokens[number] = self._made_up(number, event.names, length)
                if self._flying:
                    self.ends.setdefault(self._flying[0], []).append(event)
            case ExecutorReset():
                self._flying.clear()

    def _made_up(self, number: int, names: tuple[bytes, ...], length: int) -> list[int]:
        """Tokens far outside of any vocabulary: negative ones by name for full blocks, huge unique ones after them."""
        size = self.header.limits.block_size
        _check(len(names) * size <= length, "names: of more blocks than its tokens fill")
        self._unnamed += length - len(names) * size
        _check(self._unnamed <= MOST_UNNAMED, f"names: more than {MOST_UNNAMED} tokens so far are in no named block")
        named = [_stand_in(name) for name in names for _ in range(size)]
        return named + [(1 << 62) + (number << 24) + position for position in range(len(named), length)]

    def request(self, number: int) -> Request:
        """Request `number` as it came, with made-up tokens."""
        queued = self.queued[number]
        return Request(
            queued.id,
            self.tokens[number][: queued.prompt_tokens],
            SamplingParams(
                seed=0,
                min_tokens=queued.min_tokens,
                prompt_logprobs=0 if queued.prompt_logprobs else None,
                pooling=queued.pooling or None,
            ),
            max_len=queued.max_len,
            arrival=queued.now,
            priority=queued.priority,
            deadline=queued.deadline,
            adapter=queued.adapter,
            tenant=str(queued.tenant),
            namespace="",  # the names of its blocks tell it
            choice=queued.choice,
            parent=queued.parent,
        )


class Differs(Exception):
    """A plan is not the recorded one."""

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(f"step {plan.step} was planned differently")
        self.plan = plan


class ReplayExecutor:
    """Answers each plan with the recorded result, after making sure that it is the recorded plan."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._emitted: dict[int, int] = {}  # request number -> tokens known so far

    def capabilities(self) -> Capabilities:
        return self._recording.header.limits

    def submit(self, plan: StepPlan) -> int:
        """Differs: the plan is not the recorded one."""
        if self._recording.digests.get(plan.step) != digest_of(plan):
            raise Differs(plan)
        return plan.step

    def collect(self, ticket: int) -> StepResult:
        """The result of a single step. A step that was recorded as a run of several is taken by `collect_run`."""
        step = self._recording.steps[ticket]
        experts = () if step.shape.experts is None else (step.shape.experts,)
        result = StepResult(
            ticket, tokens=self.collect_run(ticket), finish={}, failed={}, drafts={}, experts=experts,
            seconds=step.seconds,
        )  # fmt: skip
        for end in self._recording.ends.get(ticket, ()):
            if end.reason == "stop":
                result.finish[end.id] = Finish("stop")
            elif end.reason == "error":
                result.failed[end.id] = "failed in the recorded run"
        for number, proposed in zip(step.rows, step.proposed, strict=False):
            result.drafts[self._recording.queued[number].id] = (0,) * proposed
        for number, odds in zip(step.rows, step.odds, strict=False):
            result.odds[self._recording.queued[number].id] = odds
        return result

    def collect_run(self, ticket: int) -> dict[str, tuple[int, ...]]:
        """Tokens of a step, or of the several it stands for, by row."""
        step = self._recording.steps[ticket]
        tokens: dict[str, tuple[int, ...]] = {}
        for number, count in zip(step.rows, step.emitted, strict=True):
            queued = self._recording.queued[number]
            known = self._emitted.get(number, queued.prompt_tokens)
            if count:
                tokens[queued.id] = tuple(self._recording.tokens[number][known : known + count])
                self._emitted[number] = known + count
        return tokens

    def reset(self) -> None:
        self._emitted.clear()

    def close(self) -> None:
        self.reset()


def replay(
    path: Path,
    model: StepTimeModel | None = None,
    watch: Callable[[Scheduler], None] | None = None,
    regimes: Sequence[StepTimeModel] = (),
) -> Replayed:
    """Drive a fresh scheduler through a recording until it plans otherwise, or to the end.

    Args:
        path: an event file.
        model: the step-time model of the run; needed if its budget was in milliseconds and its steps were predicted by
            a profile.
        watch: called after every step, for tests and debuggers.
        regimes: the step-time models between which the run changed, if it did.

    Raises:
        EventFileError: the file cannot be read.
        BadInput: the recording cannot be replayed.
    """
    recording = Recording(path)
    header = recording.header
    with recording.fitting(1):
        budget = msgspec.convert(header.budget, Budget)
        policy = policy_named(header.policy)
        if model is None and header.profile and header.profile.get("costs"):
            model = msgspec.convert(header.profile["costs"], FixedCosts)
    if (budget.milliseconds is not None or policy.predicts) and model is None:
        why = "its budget is in milliseconds, or its policy predicts"
        raise BadInput(str(path), f"{why}; give the step-time model of the run")
    entered = max([header.regime, *(event.regime for event in recording.events if isinstance(event, Regime))])
    if entered and entered >= len(regimes):
        raise BadInput(str(path), f"its machine came to regime {entered}; give the step-time models of all regimes")
    with recording.fitting(1):
        scheduler = Scheduler(
            header.limits, key=b"", policy=policy, budget=budget, model=model, regimes=regimes, ttl=header.ttl,
            ttft=header.ttft, drafter=msgspec.convert(header.drafter, FixedCosts | None),
        )  # fmt: skip
        hasher = scheduler.cache.hasher = NamesOfTokens(header.limits.block_size, b"")
        pools = []
        for pool in header.cache:
            cached = tuple((block, hasher.recorded(name), at) for block, name, at in pool.cached)
            pools.append(msgspec.structs.replace(pool, cached=cached))
        scheduler.begin_at(msgspec.structs.replace(header, cache=tuple(pools)))
    executor = ReplayExecutor(recording)
    try:
        for line, event in enumerate(recording.events, start=2):
            with recording.fitting(line):
                _feed(scheduler, executor, recording, event)
            if watch is not None and isinstance(event, StepDone):
                watch(scheduler)
    except Differs as difference:
        return Replayed(difference.plan.step, Difference(difference.plan.step, difference.plan))
    return Replayed(len(recording.steps), None)


def _feed(scheduler: Scheduler, executor: ReplayExecutor, recording: Recording, event: AnyEvent) -> None:
    """What the engine did at this event, done again."""
    match event:
        case Queued():
            scheduler.add(recording.request(event.number))
        case Cancelled():
            scheduler.cancel(event.id, event.now)
        case Finished() if not scheduler.in_flight:
            scheduler.cancel(event.id, event.now)  # a deadline passed; if it was a cancel, it is gone already
        case StepPlanned():
            executor.submit(scheduler.plan(event.now))
        case StepDone() if event.steps > 1:
            scheduler.commit_run(executor.collect_run(event.step), event.times, event.seconds)
        case StepDone():
            scheduler.commit(executor.collect(event.step), event.now)
        case ExecutorReset():
            scheduler.executor_reset(event.now)
        case BlocksAwaited():
            scheduler.loading.wait(event)
        case BlocksLoaded():
            scheduler.loading.load(event)
        case Regime():
            scheduler.enter_regime(event)
        case Idle():
            plan = scheduler.plan(event.now)
            if not plan.empty:
                raise Differs(plan)
