"""Conversations that a later request may go on from, for as long as there is room."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from headway.serve.conversation import Message
from headway.serve.errors import ApiError

MAX_CONVERSATIONS = 1024
MAX_CHARACTERS = 32 << 20  # of all of them together
ENTRY = 64  # characters that a turn or a call counts as, however short it is


class Conversations:
    """The latest conversations by the id of their last answer; each is its tenant's alone. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], tuple[list[Message], int]] = OrderedDict()
        self._characters = 0

    def put(self, tenant: str, id: str, turns: Sequence[Message]) -> None:
        """Keep a conversation; the oldest ones go for it."""
        size = sum(map(_characters, turns))
        with self._lock:
            self._kept[tenant, id] = (list(turns), size)
            self._characters += size
            while len(self._kept) > MAX_CONVERSATIONS or self._characters > MAX_CHARACTERS:
                self._characters -= self._kept.popitem(last=False)[1][1]

    def get(self, tenant: str, id: str) -> list[Message]:
        """
        Raises:
            ApiError: 404, it was never kept, or is no longer.
        """
        with self._lock:
            if (tenant, id) in self._kept:
                self._kept.move_to_end((tenant, id))
                return list(self._kept[tenant, id][0])
        problem = "no such response is kept; send the conversation in input"
        raise ApiError(404, f"previous_response_id: {problem}", param="previous_response_id", code="not_found")

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
