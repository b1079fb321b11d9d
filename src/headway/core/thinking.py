"""How a model's reasoning is bounded, in token ids."""

from __future__ import annotations

import msgspec


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where reasoning begins and ends in what a row generates. While it lasts, no grammar binds the row.

    Attributes:
        end: ids whose coming, in this order, ends it.
        forced: ids that are written when its budget is used up; they end with `end`.
        start: the id that opens it, if it is the first one generated; None = the prompt has opened it.
        budget: most tokens of it, marks apart; None = no limit.
    """

    end: tuple[int, ...]
    forced: tuple[int, ...]
    start: int | None = None
    budget: int | None = None
