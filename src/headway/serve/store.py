"""Conversations that a later request may go on from, for as long as there is room."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from headway.serve.conversation import Message
from headway.serve.errors import ApiError

MAX_CONVERSATIONS = 1024
MAX_CHARACTERS = 32 << 20  # of all of them together


class Conversations:
    """The latest conversations by the id of their last answer, which nobody can guess. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, tuple[list[Message], int]] = OrderedDict()
        self._characters = 0

    def put(self, id: str, turns: Sequence[Message]) -> None:
        """Keep a conversation; the oldest ones go for it."""
        size = sum(map(_characters, turns))
        with self._lock:
            self._kept[id] = (list(turns), size)
            self._characters += size
            while len(self._kept) > MAX_CONVERSATIONS or self._characters > MAX_CHARACTERS:
                self._characters -= self._kept.popitem(last=False)[1][1]

    def get(self, id: str) -> list[Message]:
        """
        Raises:
            ApiError: 404, it was never kept, or is no longer.
        """
        with self._lock:
            if id in self._kept:
                self._kept.move_to_end(id)
                return list(self._kept[id][0])
        problem = "no such response is kept; send the conversation in input"
        raise ApiError(404, f"previous_response_id: {problem}", param="previous_response_id", code="not_found")


def _characters(turn: Message) -> int:
    called = sum(len(call.name) + len(call.arguments) for call in turn.tool_calls)
    return len(turn.content) + len(turn.reasoning or "") + called
