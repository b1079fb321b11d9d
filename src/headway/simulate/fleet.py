"""A fleet: replicas of several kinds behind one router, an autoscaler, and what goes wrong.

What decides is what serves: `routing.RequestRouter` places requests and tries them again, `routing.Autoscaler` says how
many replicas there should be. Here is only what befalls them: they take their time to start, die, come back empty, and
some are slower than their data sheet.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import msgspec

from headway.core.clock import to_ps, to_seconds
from headway.core.step import StepShape
from headway.routing.autoscale import Autoscaler
from headway.scheduling.budget import StepTimeModel
from headway.simulate.deploy import Deployed
from headway.simulate.driver import EventQueue, SimulatedReplica
from headway.simulate.fleet_file import FleetFile
from headway.simulate.front import Front, Sent, prefill_seconds
from headway.simulate.trail import Samples
from headway.simulate.workload import Answers

LOOK = to_ps(1.0)  # how often the autoscaler is asked
FAIL, DRAIN, DRAINED, STARTED, ASK = "fail", "drain", "drained", "started", "ask"


class Slowed:
    """A step-time model of a machine that takes `factor` times as long; the router and the scheduler are not told."""

    def __init__(self, model: StepTimeModel, factor: float) -> None:
        self._model, self._factor = model, factor
        self.parts = model.parts

    def predict(self, shape: StepShape) -> float:
        return self._factor * self._model.predict(shape)


class FleetReplica(msgspec.Struct):
    """A replica of the fleet. Times are ps.

    Attributes:
        kind: index of its kind.
        since: when it was asked for, from which on it costs money; until: when it ended; None = it is there.
        repaired: it takes the place of one that died.
        replica: it itself; None = it has not started.
    """

    kind: int
    since: int
    until: int | None = None
    repaired: bool = False
    replica: SimulatedReplica | None = None

    @property
    def up(self) -> bool:
        return self.replica is not None and self.until is None


class SimulatedFleet:
    """Brings about what befalls the replicas of a simulation: its `Changes`.

    Args:
        kinds: the kinds of the file, ready to be simulated.
        seed: of failures at random.

    Attributes:
        members: every replica that ever started, in that order.
        counts: what happened.
        sizes: how many were up over time.
    """

    def __init__(self, file: FleetFile, kinds: Sequence[Deployed], front: Front, answers: Answers, seed: int) -> None:
        self.file, self.kinds, self.front = file, kinds, front
        self.members: list[FleetReplica] = []
        self.counts = {"started": 0, "ended": 0, "failures": 0, "tried_again": 0, "lost": 0}
        self.sizes = Samples(("up", "starting"))
        self._answers = answers
        self._random = random.Random(seed)
        self._todo: list[tuple[int, int, str, int]] = []  # (when, order, what, of whom), a heap
        self._order = self._most_up = 0
        self._starting: dict[int, FleetReplica] = {}  # by the order of what they are started by
        self._scaler = None if file.autoscale is None else Autoscaler(file.autoscale)
        self._prefills = [prefill_seconds(one.model, one.priced.shape, one.limits.max_tokens_per_step) for one in kinds]
        for kind, described in enumerate(file.kinds):
            for _ in range(described.options.count):
                self._join(FleetReplica(kind, 0), 0)
        for event in file.events:
            self._plan(to_ps(event.at), event.what, event.replica)
        if self._scaler is not None:
            self._plan(0, ASK)
        self._look(0)

    @property
    def replicas(self) -> list[SimulatedReplica]:
        """Every one that ever started, in that order."""
        return [member.replica for member in self.members if member.replica is not None]

    @property
    def at(self) -> int | None:
        """When the next thing happens, ps."""
        return self._todo[0][0] if self._todo else None

    def act(self, events: EventQueue, now: int) -> list[Sent]:
        """It happens -> which requests go where because of it."""
        _, order, what, index = heapq.heappop(self._todo)
        if what == STARTED:
            events.add(self._join(self._starting.pop(order), now))
        elif what == ASK:
            self._scale(now)
            self._plan(now + LOOK, ASK)
        elif index < len(self.members) and self.members[index].up:
            if what == FAIL:
                self._fail(index, events, now)
            elif what == DRAIN:
                self._drain(index, now)
            else:
                self._end_drained(index, now)
        self._look(now)
        return self.front.sent(now)

    def device_seconds(self, end: int) -> list[float]:
        """Of each kind: seconds from when replicas were asked for until they were given back, times their devices."""
        found = [0.0] * len(self.kinds)
        for member in (*self.members, *self._starting.values()):
            until = end if member.until is None else member.until
            found[member.kind] += to_seconds(max(0, until - member.since)) * self.kinds[member.kind].priced.gpus
        return found

    @property
    def most_up(self) -> int:
        """How many served at the same time, at most."""
        return self._most_up

    def _plan(self, at: int, what: str, index: int = -1) -> int:
        heapq.heappush(self._todo, (at, self._order, what, index))
        self._order += 1
        return self._order - 1

    def _start(self, kind: int, since: int, at: int, repaired: bool = False) -> None:
        """One more is on its way."""
        self._starting[self._plan(at, STARTED)] = FleetReplica(kind, since, repaired=repaired)

    def _join(self, member: FleetReplica, now: int) -> SimulatedReplica:
        """It serves, with an empty cache."""
        index, kind, slow = len(self.members), self.kinds[member.kind], self.file.kinds[member.kind].options.slow
        member.replica = kind.replica(
            self._answers, number=index, truth=None if slow == 1 else Slowed(kind.model, slow)
        )
        self.members.append(member)
        self.front.join(index, self._prefills[member.kind], min(kind.limits.blocks) if kind.setup.prefix_cache else 0)
        self.counts["started"] += 1
        if self.file.options.mtbf_hours is not None:
            lives = to_ps(3600 * self.file.options.mtbf_hours * self._random.expovariate(1.0))
            self._plan(now + max(1, lives), FAIL, index)
        return member.replica

    def _fail(self, index: int, events: EventQueue, now: int) -> None:
        """It dies; another one takes its place when it is repaired."""
        member, router = self.members[index], self.front.router
        member.until = now
        if router.replicas[str(index)].draining:
            self.counts["ended"] += 1
        else:
            self._start(member.kind, now, now + to_ps(self.file.options.repair_seconds), repaired=True)
        self._await()
        router.lose(str(index))
        again, lost = events.lose(index, now)
        router.leave(str(index))
        self.counts["failures"] += 1
        self.counts["tried_again"] += again
        self.counts["lost"] += lost

    def _scale(self, now: int) -> None:
        """Start or drain as many as the autoscaler says."""
        assert self._scaler is not None, "asked only where there is one"
        router, scaled = self.front.router, self.file.options.scaled
        starting = sum(not one.repaired for one in self._starting.values())  # a repair may take long
        up = [index for index, one in enumerate(self.members) if one.up and router.replicas[str(index)].open]
        more = self._scaler.wanted(router, starting, now) - len(up) - starting
        for _ in range(more):
            self._start(scaled, now, now + to_ps(self.file.kinds[scaled].options.start_seconds))
        spare = [index for index in up if self.members[index].kind == scaled]
        spare.sort(key=lambda index: (router.replicas[str(index)].load, -index))
        for index in spare[: max(0, -more)]:
            self._drain(index, now)

    def _drain(self, index: int, now: int) -> None:
        self.front.router.drain(str(index))
        self._end_drained(index, now)

    def _end_drained(self, index: int, now: int) -> None:
        """It ends when it has nothing left, or is looked at again."""
        if self.front.router.drained(str(index)):
            self.front.router.leave(str(index))
            self.members[index].until = now
            self.counts["ended"] += 1
        else:
            self._plan(now + LOOK, DRAINED, index)

    def _await(self) -> None:
        self.front.router.awaited = self._scaler is not None or bool(self._starting)

    def _look(self, now: int) -> None:
        self._await()
        self._most_up = max(self._most_up, len(self.front.router.replicas))
        if self.sizes.wants(to_seconds(now)):
            self.sizes.add(to_seconds(now), sum(one.up for one in self.members), len(self._starting))
