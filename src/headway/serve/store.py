"""Conversations that a later request may go on from, for as long as there is room."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import partial

from headway.serve.conversation import Message
from headway.serve.errors import ApiError

MAX_CONVERSATIONS = 1024
MAX_CHARACTERS = 32 << 20  # of all of them together
SHARE = 4  # one in so many is what a tenant may have of either, while others have any
ENTRY = 64  # characters that a turn or a call counts as, however short it is


class Conversations:
    """The latest conversations by the id of their last answer; each is its tenant's alone. Thread-safe.

    A tenant that fills the store displaces its own conversations first: those of others go only where they have more
    than their share too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, OrderedDict[str, tuple[list[Message], int]]] = {}  # by tenant, the latest used last
        self._characters: Counter[str] = Counter()

    def put(self, tenant: str, id: str, turns: Sequence[Message]) -> None:
        """Keep a conversation; the oldest ones go for it."""
        size = sum(map(_characters, turns))
        with self._lock:
            self._forget(tenant, id)
            self._kept.setdefault(tenant, OrderedDict())[id] = (list(turns), size)
            self._characters[tenant] += size
            while self._full(1.0, *self._all()):
                greedy = self._full(1 / SHARE, len(self._kept[tenant]), self._characters[tenant])
                victim = tenant if greedy else max(self._kept, key=self._use)
                self._forget(victim, next(iter(self._kept[victim])))

    def get(self, tenant: str, id: str) -> list[Message]:
        """
        Raises:
            ApiError: 404, it was never kept, or is no longer.
        """
        with self._lock:
            own = self._kept.get(tenant, OrderedDict())
            if id in own:
                own.move_to_end(id)
                return list(own[id][0])
        problem = "no such response is kept; send the conversation in input"
        raise ApiError(404, f"previous_response_id: {problem}", param="previous_response_id", code="not_found")

    def _all(self) -> tuple[int, int]:
        """Conversations of all tenants, and their characters."""
        return sum(map(len, self._kept.values())), self._characters.total()

    @staticmethod
    def _full(share: float, count: int, characters: int) -> bool:
        return count > share * MAX_CONVERSATIONS or characters > share * MAX_CHARACTERS

    def _use(self, tenant: str) -> float:
        """What a tenant has, as a part of all there may be."""
        return max(len(self._kept[tenant]) / MAX_CONVERSATIONS, self._characters[tenant] / MAX_CHARACTERS)

    def _forget(self, tenant: str, id: str) -> None:
        own = self._kept.get(tenant, OrderedDict())
        if id in own:
            self._characters[tenant] -= own.pop(id)[1]
        if not own:
            self._kept.pop(tenant, None)
            self._characters.pop(tenant, None)

    def of(self, tenant: str) -> Kept:
        """Those of one tenant."""
        return Kept(self, tenant)


class Kept:
    """The conversations of one tenant; methods as of `Conversations`."""

    def __init__(self, all: Conversations, tenant: str) -> None:
        self.put = partial(all.put, tenant)
        self.get = partial(all.get, tenant)


def _characters(turn: Message) -> int:
    called = sum(len(call.id) + len(call.name) + len(call.arguments) + ENTRY for call in turn.tool_calls)
    texts = (turn.content, turn.reasoning, turn.name, turn.tool_call_id)
    return sum(len(text or "") for text in texts) + called + ENTRY
