"""A request as the scheduler sees it: what was asked, the blocks it owns, and where it waits or runs."""

from __future__ import annotations

from enum import Enum

from headway.cache.table import BlockTable
from headway.core.pooling import WHOLE
from headway.core.request import Request

# A request whose blocks were taken back this often is not readmitted on hope: only when its worst case fits, and
# the difference stays reserved, so that it is never preempted for blocks again.
STRICT_AFTER = 2


class Place(Enum):
    """The one collection a live request is in."""

    WAITING = "waiting"  # in the admission queue
    LOADING = "loading"  # waits until blocks of its prompt are back from the cache's second tier
    FORKING = "forking"  # a choice that waits for its parent's prompt
    RUNNING = "running"  # holds blocks, planned step after step


class Row:
    """A live request.

    Attributes:
        request: the counters and parameters.
        table: its blocks.
        number: how many requests were added before it.
        parent: choice 0 of its request, if it is another choice.
        forks: choices that wait for this one's prompt.
        order: (priority, arrival, number); smaller goes first, everywhere.
        place: which collection it is in.
        held: the executor has this row (a RowInit was sent and no `gone`).
        strict: admitted with its worst case reserved.
        reported: prompt positions whose logprobs were already wanted from the executor.
        wants_prompt_logprobs: some are still to be reported, so every prompt position must be computed. One choice does
            it.
        remaining: while it waits, prompt tokens that are not in the cache; None = not looked up yet.
        overtaken: rows admitted past it while it was the first to wait and its blocks were not there.
    """

    __slots__ = (
        "forks",
        "held",
        "number",
        "order",
        "overtaken",
        "parent",
        "place",
        "remaining",
        "reported",
        "request",
        "strict",
        "table",
        "wants_prompt_logprobs",
    )

    def __init__(self, request: Request, table: BlockTable, number: int, parent: Row | None = None) -> None:
        self.request = request
        self.table = table
        self.number = number
        self.parent = parent
        self.forks: list[Row] = []
        self.order = (request.priority, request.arrival, number)
        self.place = Place.WAITING
        self.held = False
        self.strict = False
        self.reported = 0
        self.wants_prompt_logprobs = (
            request.params.prompt_logprobs is not None and request.choice == 0 and request.prompt_len > 1
        )
        self.remaining: int | None = None
        self.overtaken = 0

    @property
    def uncached(self) -> bool:
        """Nothing of its prompt may come from the cache: something is wanted of every position."""
        return self.wants_prompt_logprobs or self.request.params.pooling in WHOLE

    @property
    def rank(self) -> tuple[bool, tuple[int, int, int]]:
        """Order among running rows: blocks are taken back from the last. Strict rows come first: never from them."""
        return (not self.strict, self.order)

    @property
    def work(self) -> tuple[int, int, int, int]:
        """Order among prompts: the least to compute first, within a priority."""
        left = self.request.todo if self.place is Place.RUNNING else self.remaining
        assert left is not None, "it is ranked when it is looked up"
        return (self.request.priority, left, *self.order[1:])

    def report(self, end: int) -> None:
        """The logprobs of the prompt up to position `end` were wanted from the executor."""
        last = self.request.prompt_len - 1
        self.reported = min(end, last)
        self.wants_prompt_logprobs = self.reported < last

    def __repr__(self) -> str:
        return f"Row({self.request!r}, {self.place.value})"
