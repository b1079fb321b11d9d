"""A plan that was handed out and whose result is not committed yet."""

from __future__ import annotations

from headway.cache.table import BlockTable
from headway.core.step import StepPlan, StepShape
from headway.scheduling.row import Row


class Flight:
    """A plan in flight.

    Attributes:
        plan: what the executor works on.
        rows: the row of each Work, in order.
        copied: rows that share a block by a copy which this plan orders.
        admitted: how many rows it admitted.
        waited: somebody waited when it was planned.
        planned: when, ps.
        idle: ps since the step before was committed; 0 if another was in flight.
        shape: size of the step, if anyone wants to know.
        undrafted: seconds that it was expected to take without its drafts; None = it has none, or nobody knows.
        tables: of rows that ended meanwhile. Their blocks are named by this plan or by one before, so they are given
            back when it is committed.
    """

    __slots__ = ("admitted", "copied", "idle", "plan", "planned", "rows", "shape", "tables", "undrafted", "waited")

    def __init__(
        self,
        plan: StepPlan,
        rows: list[Row],
        copied: list[Row],
        *,
        admitted: int,
        waited: bool,
        planned: int,
        idle: int,
        shape: StepShape | None,
        undrafted: float | None = None,
    ) -> None:
        self.plan = plan
        self.rows = rows
        self.copied = copied
        self.admitted = admitted
        self.waited = waited
        self.planned = planned
        self.idle = idle
        self.shape = shape
        self.undrafted = undrafted
        self.tables: list[BlockTable] = []
