"""The engine's half of a KV connector: it has the bytes of cache blocks brought in and given away.

scheduling.loading     which blocks of a prompt are to come, and who waits for them      (the scheduler's half)
KVConnector            reads and writes them between two steps                           (this half)

kv_disk.DiskTier       a tier of the prefix cache on disk: gives what is evicted, brings what comes back
transfer.peers         other engines: gives prompts that are computed for them, brings those computed elsewhere
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headway.core.request import Request
from headway.engine.messages import Submit


class KVConnector(Protocol):
    """Used by the thread that turns the loop, which alone touches the cache."""

    def order(self, message: Submit) -> Submit:
        """A request comes -> what the engine is asked for in its place.

        Raises:
            BadInput: it asks for something that this connector does not do.
        """
        ...

    def added(self, message: Submit, request: Request) -> None:
        """That request is in the scheduler."""
        ...

    def turn(self) -> None:
        """Between two steps: write a piece of what requests wait for into the cache, for a bounded time."""
        ...

    def save(self) -> None:
        """Read what goes away from here. Before anything is written to the cache, and after each step: what lost its
        name in between is in its place yet."""
        ...

    def close(self) -> None:
        """Give back what it holds. Idempotent."""
        ...


class Connectors:
    """Several as one, asked in their order."""

    def __init__(self, *connectors: KVConnector) -> None:
        self._connectors: Sequence[KVConnector] = connectors

    def order(self, message: Submit) -> Submit:
        for connector in self._connectors:
            message = connector.order(message)
        return message

    def added(self, message: Submit, request: Request) -> None:
        for connector in self._connectors:
            connector.added(message, request)

    def turn(self) -> None:
        for connector in self._connectors:
            connector.turn()

    def save(self) -> None:
        for connector in self._connectors:
            connector.save()

    def close(self) -> None:
        for connector in self._connectors:
            connector.close()
