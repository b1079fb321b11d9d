"""How many replicas there should be, from what the router knows: predicted time to first token, and what waits.

No clock and no processes: whoever drives it asks from time to time, starts or drains what it says, and tells how many
are on their way. The simulator and whoever starts real replicas ask the same one.
"""

from __future__ import annotations

import math
from typing import Annotated

from headway.core.clock import MAX_SECONDS, to_ps, to_seconds
from headway.core.errors import BadInput
from headway.core.options import Option, Options
from headway.routing.router import RequestRouter

MOST_REPLICAS = 1 << 16
DOUBLE = 2.0  # at most so many times as many at once: what is predicted under a queue is rough
EASE = 0.5  # fewer must meet this share of the target to be enough
FULL = 0.8  # and hold what is in flight in this share of their places


class Autoscale(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an autoscaler aims for.

    Raises:
        BadInput: a value is not one that its option accepts, or `least` is above `most`.
    """

    least: Annotated[int, Option("Replicas there are at least; 0 = none while nobody asks.", least=0)] = 1
    most: Annotated[int, Option("Replicas there are at most.", least=1, most=MOST_REPLICAS)] = 8
    ttft: Annotated[
        float, Option("Seconds to a first token, predicted for a newcomer, above which more start.", above=0)
    ] = 1.0
    up_after: Annotated[
        float, Option("Seconds for which it must be above before more start.", least=0, most=MAX_SECONDS)
    ] = 2.0
    down_after: Annotated[
        float, Option("Seconds for which fewer must have been enough before one ends.", least=0, most=MAX_SECONDS)
    ] = 120.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.most:
            raise BadInput("least", f"{self.least} is above most, {self.most}")

    @classmethod
    def about(cls) -> str:
        return "an autoscaler"


class Autoscaler:
    """Decides by `goal`. A fold over what it is shown: same sights, same decisions."""

    def __init__(self, goal: Autoscale) -> None:
        self.goal = goal
        self._tight: int | None = None  # since when more are needed, ps
        self._easy: int | None = None  # since when fewer are enough

    def wanted(self, router: RequestRouter, starting: int, now: int) -> int:
        """How many there should be now, those on their way included.

        Args:
            starting: replicas on their way, which the router does not know yet.
        """
        goal = self.goal
        up = [replica for replica in router.replicas.values() if replica.open]
        there = len(up) + starting
        if there < goal.least:
            return goal.least
        if not there:
            return min(goal.most, 1) if router.waiting else 0
        waited = 0.0
        if router.waiting_since is not None and not starting:  # else those on their way are what it waits for
            waited = to_seconds(now - router.waiting_since)
        pressure = max(self._pressure(router, there, now), waited / goal.ttft)
        self._tight = (now if self._tight is None else self._tight) if pressure > 1 else None
        if self._tight is not None and now - self._tight >= to_ps(goal.up_after) and there < goal.most:
            self._tight = self._easy = None
            return min(goal.most, max(there + 1, math.ceil(there * min(pressure, DOUBLE))))
        easy = there > goal.least and not starting and self._fewer_do(router, there, now)
        self._easy = (now if self._easy is None else self._easy) if easy else None
        if self._easy is not None and now - self._easy >= to_ps(goal.down_after):
            self._easy = None
            return there - 1
        return min(there, goal.most)

    def _pressure(self, router: RequestRouter, replicas: int, now: int) -> float:
        """Predicted seconds until a newcomer's turn, all work shared by so many replicas, over the target."""
        return router.work_seconds(now) / replicas / self.goal.ttft

    def _fewer_do(self, router: RequestRouter, replicas: int, now: int) -> bool:
        """Whether one less would be enough for what there is."""
        up = [replica for replica in router.replicas.values() if replica.open]
        load = sum(replica.load for replica in up)
        if replicas == 1:
            return not load and not router.waiting
        room = sum(replica.most or 0 for replica in up) * (replicas - 1) / len(up) if up else 0.0
        if router.waiting or (room and load > FULL * room):
            return False
        return self._pressure(router, replicas - 1, now) < EASE
