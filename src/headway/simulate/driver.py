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
from headway.core.errors import BadInput, Reject, Rejected
from headway.core.request import Finish, Request
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


class Changes(Protocol):
    """What befalls replicas themselves: they come, go, and fail."""

    @property
    def at(self) -> int | None:
        """When the next thing does, ps; None = nothing more."""
        ...

    def act(self, events: EventQueue, now: int) -> list[Sent]:
        """It does -> which requests go where because of it."""
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

    def request(self, ask: Ask) -> Request:
        """One that it has, as its scheduler knows it."""
        for scheduler in self.schedulers:
            row = scheduler.state.rows.get(str(ask.number))
            if row is not None:
                return row.request
        return ask.request(self.schedulers[0].limits.max_model_len)

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
ARRIVAL, CHANGE = -1, -2  # what comes next, where it is no replica's turn
DIED = Finish("error", "its replica died")


def run(
    replicas: Sequence[SimulatedReplica],
    source: Source,
    observer: Observer,
    answers: Answers,
    front: Front | None = None,
    progress: Callable[[int], None] = lambda now: None,
    changes: Changes | None = None,
) -> int:
    """Play everything to its end. -> the time then, ps.

    Args:
        front: who decides where requests go and when; None = in turn.
        changes: of the replicas; None = they stay as they are.
    """
    events = EventQueue(replicas, source, observer, answers, front or Front("round-robin", len(replicas)), changes)
    now = turns = 0
    while (due := events.next()) is not None:
        now, index = due
        if now > LONGEST:
            raise BadInput("--requests", f"they take more than {to_seconds(LONGEST) / 86400:.0f} days; simulate fewer")
        idle = [index] if index >= 0 else events.arrive(now) if index == ARRIVAL else events.change(now)
        for one in idle:  # grows as it goes
            idle += events.turn(one, now)
            turns += 1
            if turns % 256 == 0:
                progress(now)
    assert not events.asks, "every request ends"
    return now


class EventQueue:
    """What comes next, and what it brings about.

    Attributes:
        asks: requests that have arrived and not ended, by id.
    """

    def __init__(
        self, replicas: Sequence[SimulatedReplica], source: Source, observer: Observer, answers: Answers, front: Front,
        changes: Changes | None,
    ) -> None:  # fmt: skip
        self.asks: dict[str, Ask] = {}
        self._replicas, self._source, self._observer = list(replicas), source, observer
        self._answers, self._front, self._changes = answers, front, changes
        self._where: dict[str, int] = {}  # which replica has a request, by its id
        self._arrivals = _Arrivals(source.first())
        self._steps: list[tuple[int, int]] = []  # (when a replica wants to be looked at, its index)
        self._wanted: list[int | None] = [None] * len(replicas)  # when each does; what else is in `_steps` is stale

    def next(self) -> tuple[int, int] | None:
        """(when, index of a replica, ARRIVAL or CHANGE) of what comes next; None = nothing more."""
        at, steps = self._arrivals.at, self._steps
        while steps and self._wanted[steps[0][1]] != steps[0][0]:
            heapq.heappop(steps)
        if self._changes is not None and (self.asks or at is not None):
            change = self._changes.at
            if change is not None and (at is None or change < at) and (not steps or change < steps[0][0]):
                return change, CHANGE
        if steps and (at is None or steps[0][0] < at):
            when, index = heapq.heappop(steps)
            self._wanted[index] = None
            return when, index
        return None if at is None else (at, ARRIVAL)

    def arrive(self, now: int) -> list[int]:
        """The next request comes -> idle replicas that have something to do now."""
        ask = self._arrivals.take()
        self.asks[str(ask.number)] = ask
        self._observer.arrived(ask)
        try:
            sent = self._front.offer(ask, now)
        except Rejected as error:
            self._refuse(ask, error, now)
            return []
        return self._send(sent, now)

    def change(self, now: int) -> list[int]:
        """Something befalls replicas -> idle ones that have something to do now."""
        assert self._changes is not None, "there is one"
        sent = self._changes.act(self, now)
        for ask in self._front.abandoned(now):
            self._refuse(ask, Rejected(Reject.QUEUE_FULL, "no replica is up", 0.0), now)
        return self._send(sent, now)

    def add(self, replica: SimulatedReplica) -> None:
        """One that has just started, with the next index."""
        self._replicas.append(replica)
        self._wanted.append(None)

    def lose(self, index: int, now: int) -> tuple[int, int]:
        """A replica dies, and all that it has: what has no token yet is tried elsewhere -> how many requests wait
        again, and how many are lost. The caller has told the router."""
        self._wanted[index] = None
        again = lost = 0
        replica = self._replicas[index]
        replica.executor.cut(now)  # what it had ahead of it does not happen
        for id in [id for id, at in self._where.items() if at == index]:
            del self._where[id]
            self._answers.forget(id)
            ask = self.asks[id]
            if self._front.failed(ask, now):
                again += 1
                continue
            lost += 1
            emission = Emission(replica.request(ask), finish=DIED)
            self._observer.emitted(emission, (now,))
            self._follow(self.asks.pop(id), emission, now)
        return again, lost

    def _refuse(self, ask: Ask, error: Rejected, now: int) -> None:
        self._observer.refused(ask, error, now)
        self._follow(self.asks.pop(str(ask.number)), None, now)

    def turn(self, index: int, now: int) -> list[int]:
        """A replica is looked at -> idle ones that have something to do now."""
        replica, sent, observer = self._replicas[index], list[Sent](), self._observer
        emissions, times = replica.turn(now, observer)
        for emission in emissions:
            observer.emitted(emission, times if emission.tokens else (now,))
            sent += self._front.heard(emission, now)
            if emission.finish is not None:
                self._answers.forget(emission.request.id)
                del self._where[emission.request.id]
                self._follow(self.asks.pop(emission.request.id), emission, now)
        for ask in replica.refused:
            id = str(ask.number)
            del self.asks[id], self._where[id]
            sent += self._front.over(id, now)
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
            self._where[str(ask.number)] = index
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
