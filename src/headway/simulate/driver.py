"""Discrete events: requests arrive, steps end, and between them the very scheduler that serves decides.

    arrivals --Front--> inbox --(next plan)--> Scheduler --> SimulatedRanks --(step ends)--> Scheduler --> Trail
               ^                                                                                |
               '----------------------- first tokens, ends: room at a replica ------------------'

An engine looks at what has arrived between two steps, so a request that comes while a step is planned already waits for
the next one. Time is whole picoseconds; of two things at the same moment the arrival comes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from headway.core.clock import VirtualClock, to_seconds
from headway.core.errors import BadInput, Rejected
from headway.core.step import StepPlan
from headway.executor.simulated import SimulatedRanks
from headway.scheduling.scheduler import Scheduler
from headway.scheduling.state import Emission
from headway.simulate.front import Front, Sent
from headway.simulate.workload import Answers, Ask


class Source(Protocol):
    """Where requests come from."""

    def first(self) -> Iterator[Ask]:
        """Those that come whatever happens, by time."""
        ...

    def then(self, ask: Ask, emission: Emission | None, now: int) -> Ask | None:
        """The one that comes because another has ended: a closed loop's, or a conversation's next turn. `emission`
        is its end; None = it was refused."""
        ...


class Observer(Protocol):
    """Who keeps what happens."""

    def arrived(self, ask: Ask) -> None: ...

    def taken(self, id: str, now: int) -> None:
        """The engine has read it."""
        ...

    def refused(self, ask: Ask, error: Rejected, now: int) -> None: ...

    def planned(self, replica: SimulatedReplica, plans: Sequence[StepPlan], now: int) -> None: ...

    def repeated(self, plan: StepPlan, more: int) -> None:
        """A plan was carried out in `more` further steps, each for as many rows and tokens."""
        ...

    def emitted(self, emission: Emission, times: Sequence[int]) -> None:
        """What a client hears, and when each of the steps behind it ended, ps."""
        ...


class SimulatedReplica:
    """One replica: a scheduler per data-parallel rank, and the executor that plays their steps.

    Args:
        leaps: play many equal steps at once. What comes out is the same; needs one rank and one step in flight.
    """

    def __init__(
        self,
        schedulers: Sequence[Scheduler],
        executor: SimulatedRanks,
        clock: VirtualClock,
        answers: Answers,
        leaps: bool = False,
    ) -> None:
        self.schedulers = schedulers
        self.executor = executor
        self._clock = clock
        self._answers = answers
        self._depth = executor.limits.max_in_flight
        self._leaps = leaps
        assert not leaps or (len(schedulers) == 1 and self._depth == 1), "only single steps of one rank can be leapt"
        self._run: StepPlan | None = None  # whose steps are leapt over
        self._inbox: list[list[Ask]] = [[] for _ in schedulers]
        self.refused: list[Ask] = []  # since the caller looked

    @property
    def due(self) -> int | None:
        """When its oldest step ends, ps; None = it does nothing."""
        return self.executor.due if self.executor.in_flight else None

    @property
    def next_deadline(self) -> int | None:
        """When an idle replica must look again, ps."""
        times = [at for s in self.schedulers if (at := s.next_deadline) is not None]
        return min(times, default=None)

    def offer(self, ask: Ask, now: int) -> None:
        """A request arrives; it goes to the rank that has least to do, waiting ones counting for more."""
        inbox = self._inbox[0]
        if len(self._inbox) > 1:
            loads = [
                4 * (s.waiting + len(box)) + s.running for s, box in zip(self.schedulers, self._inbox, strict=True)
            ]
            inbox = self._inbox[loads.index(min(loads))]
        inbox.append(ask)
        self.executor.cut(now)

    def turn(self, now: int, observer: Observer) -> tuple[list[Emission], Sequence[int]]:
        """At the end of a step, or when something arrived at an idle replica: commit, take what has arrived, and plan.
        -> what happened to requests, and when the steps behind it ended."""
        self._clock.advance_to(now)
        emissions: list[Emission] = []
        times: Sequence[int] = (now,)
        if self.executor.in_flight and self.executor.due <= now:
            if self._run is not None:
                emissions, times = self._land(self._run, observer)
            else:
                for scheduler, result in zip(self.schedulers, self.executor.collect(), strict=True):
                    if result.step >= 0:
                        emissions += scheduler.commit(result, now)
        for scheduler, inbox in zip(self.schedulers, self._inbox, strict=True):
            if inbox:
                self._take(scheduler, inbox, now, observer)
        while self.executor.in_flight < self._depth:
            plans = [self._plan(scheduler, now) for scheduler in self.schedulers]
            for scheduler in self.schedulers:
                emissions += scheduler.take_emissions()
            if all(plan.empty for plan in plans):
                break
            self._submit(plans)
            observer.planned(self, plans, now)
        return emissions, times

    def _submit(self, plans: Sequence[StepPlan]) -> None:
        """Start a step, and go on with its plan for as long as it keeps its shape: to the first end of an answer or
        deadline, or until something arrives."""
        scheduler, plan = self.schedulers[0], plans[0]
        steps = 1
        if self._leaps and scheduler.horizon(2) > 1:
            steps = scheduler.horizon(min([self._answers.left(work.id, work.start + 1) for work in plan.work]))
        end = self.executor.submit(plans, steps)
        if steps > 1:
            self._run = plan
            deadline = scheduler.next_deadline
            if deadline is not None and deadline <= end:
                self.executor.cut(deadline)

    def _land(self, plan: StepPlan, observer: Observer) -> tuple[list[Emission], Sequence[int]]:
        """A run has ended."""
        times = self.executor.collect_run()
        observer.repeated(plan, len(times) - 1)
        tokens = {work.id: self._answers.run(work.id, work.start + 1, len(times)) for work in plan.work}
        self._run = None
        return self.schedulers[0].commit_run(tokens, times), times

    def _plan(self, scheduler: Scheduler, now: int) -> StepPlan:
        plan = scheduler.plan(now)
        return plan if not plan.empty else NO_PLAN

    def _take(self, scheduler: Scheduler, inbox: list[Ask], now: int, observer: Observer) -> None:
        for ask in inbox:
            observer.taken(str(ask.number), now)
            try:
                scheduler.add(ask.request(scheduler.limits.max_model_len))
                self._answers.expect(ask)
            except Rejected as error:
                self.refused.append(ask)
                observer.refused(ask, error, now)
        inbox.clear()


LONGEST = (1 << 63) - 1  # ps; times are kept as 64-bit integers
NO_PLAN = StepPlan(-1)  # of a rank with nothing to do


def run(
    replicas: Sequence[SimulatedReplica],
    source: Source,
    observer: Observer,
    answers: Answers,
    front: Front | None = None,
    progress: Callable[[int], None] = lambda now: None,
) -> int:
    """Play everything to its end. -> the time then, ps.

    Args:
        front: who decides where requests go and when; None = in turn.
    """
    events = _Events(replicas, source, answers, front or Front("round-robin", len(replicas)))
    now = turns = 0
    while (due := events.next()) is not None:
        now, index = due
        if now > LONGEST:
            raise BadInput("--requests", f"they take more than {to_seconds(LONGEST) / 86400:.0f} days; simulate fewer")
        idle = [index] if index >= 0 else events.arrive(observer, now)
        for one in idle:  # grows as it goes
            idle += events.turn(one, observer, now)
            turns += 1
            if turns % 256 == 0:
                progress(now)
    assert not events.asks, "every request ends"
    return now


class _Events:
    """What comes next, and what it brings about.

    Attributes:
        asks: requests that have arrived and not ended, by id.
    """

    def __init__(self, replicas: Sequence[SimulatedReplica], source: Source, answers: Answers, front: Front) -> None:
        self.asks: dict[str, Ask] = {}
        self._replicas, self._source, self._answers, self._front = replicas, source, answers, front
        self._arrivals = _Arrivals(source.first())
        self._steps: list[tuple[int, int]] = []  # (when a replica wants to be looked at, its index)
        self._wanted: list[int | None] = [None] * len(replicas)  # when each does; what else is in `_steps` is stale

    def next(self) -> tuple[int, int] | None:
        """(when, index of a replica, or -1 for an arrival) of what comes next; None = nothing more."""
        at, steps = self._arrivals.at, self._steps
        while steps and self._wanted[steps[0][1]] != steps[0][0]:
            heapq.heappop(steps)
        if steps and (at is None or steps[0][0] < at):
            when, index = heapq.heappop(steps)
            self._wanted[index] = None
            return when, index
        return None if at is None else (at, -1)

    def arrive(self, observer: Observer, now: int) -> list[int]:
        """The next request comes -> idle replicas that have something to do now."""
        ask = self._arrivals.take()
        self.asks[str(ask.number)] = ask
        observer.arrived(ask)
        return self._send(self._front.offer(ask, now), now)

    def turn(self, index: int, observer: Observer, now: int) -> list[int]:
        """A replica is looked at -> idle ones that have something to do now."""
        replica, sent = self._replicas[index], list[Sent]()
        emissions, times = replica.turn(now, observer)
        for emission in emissions:
            observer.emitted(emission, times if emission.tokens else (now,))
            sent += self._front.heard(emission, now)
            if emission.finish is not None:
                self._answers.forget(emission.request.id)
                self._follow(self.asks.pop(emission.request.id), emission, now)
        for ask in replica.refused:
            del self.asks[str(ask.number)]
            sent += self._front.over(str(ask.number), now)
            self._follow(ask, None, now)
        replica.refused.clear()
        self._want(index, replica.due if replica.due is not None else replica.next_deadline)
        return self._send(sent, now)

    def _follow(self, ask: Ask, emission: Emission | None, now: int) -> None:
        """A request has ended; another one may come because of it."""
        following = self._source.then(ask, emission, now)
        if following is not None:
            self._arrivals.push(following)

    def _send(self, sent: Iterable[Sent], now: int) -> list[int]:
        """Requests go to replicas, which see them when their steps end -> those that do nothing: they see them now."""
        idle = []
        for ask, index in sent:
            self._replicas[index].offer(ask, now)
            due = self._replicas[index].due
            if due is not None:
                self._want(index, due)  # a run may have been cut short
            elif index not in idle:
                idle.append(index)
        return idle

    def _want(self, index: int, at: int | None) -> None:
        if at is not None and at != self._wanted[index]:
            heapq.heappush(self._steps, (at, index))
        self._wanted[index] = at


class _Arrivals:
    """Requests to come: a stream by time, and those that others brought about."""

    def __init__(self, stream: Iterable[Ask]) -> None:
        self._stream = iter(stream)
        self._later: list[tuple[int, int, Ask]] = []
        self._ahead = next(self._stream, None)

    @property
    def at(self) -> int | None:
        """When the next one comes, ps."""
        if self._later and (self._ahead is None or self._later[0][0] < self._ahead.at):
            return self._later[0][0]
        return None if self._ahead is None else self._ahead.at

    def push(self, ask: Ask) -> None:
        heapq.heappush(self._later, (ask.at, ask.number, ask))

    def take(self) -> Ask:
        if self._later and (self._ahead is None or self._later[0][0] < self._ahead.at):
            return heapq.heappop(self._later)[2]
        ask, self._ahead = self._ahead, next(self._stream, None)
        assert ask is not None, "asked for after the last one"
        return ask
