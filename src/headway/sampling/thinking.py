"""Where a row is in its reasoning."""

from __future__ import annotations

from headway.core.thinking import Thinking


class ThinkingState:
    """Follows the tokens of a row.

    Attributes:
        undecided: the first token tells whether there will be any reasoning.
        active: it lasts.
    """

    __slots__ = ("_count", "_how", "_tail", "_written", "active", "undecided")

    def __init__(self, how: Thinking) -> None:
        self._how = how
        self.undecided = how.start is not None
        self.active = not self.undecided
        self._count = 0
        self._written = 0  # of the forced ids
        self._tail: tuple[int, ...] = ()  # the latest ids, as many as could end it

    @property
    def start(self) -> int | None:
        return self._how.start

    @property
    def forced(self) -> int | None:
        """The only id that may come next, if the budget is used up."""
        how = self._how
        if not self.active or how.budget is None or (self._count < how.budget and not self._written):
            return None
        return how.forced[self._written]

    def take(self, token: int) -> bool:
        """A token became part of the row -> whether it belongs to the reasoning."""
        if self.undecided:
            self.undecided = False
            self.active = token == self._how.start
            return self.active
        if not self.active:
            return False
        if self.forced is not None:
            self._written += 1
        self._count += 1
        end = self._how.end
        self._tail = (*self._tail, token)[-len(end) :]
        if self._tail == end:
            self.active = False
        return True
