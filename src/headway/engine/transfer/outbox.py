"""What an engine keeps for others: copies of blocks, by ticket, each under a lease.

    open     the request with the ticket is here                     (the engine's thread)
    put      a block of it is computed: copied, if it is wanted      (the engine's thread)
    finish   nothing more will be computed                           (the engine's thread)
    claim    somebody brought the ticket, and says what it wants     (a connection's thread)
    take     the next block for it                                   (a connection's thread)
    end      it has got all, or has gone                             (a connection's thread)

The lease begins when a ticket is opened, and is renewed by whoever claims it with every sign of life. What is not
fetched by its end is dropped. Blocks are copied, so a lease keeps none of the engine's own.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from headway.cache.tier import TierKey

LEASE_SECONDS = 10.0
MOST_BYTES = 256 << 20  # of blocks that wait to be fetched
MOST_TICKETS = 4096


class Parcel:
    """Blocks of one prompt on their way.

    Attributes:
        request: id of the request that computes them; "" = it has not come yet.
        wanted: what is asked for; None = nobody has asked yet.
        ready: copied, and not taken yet, in order.
        complete: nothing more will be put.
        claimed: somebody has asked.
        until: end of the lease, by the monotonic clock.
    """

    def __init__(self, until: float) -> None:
        self.request = ""
        self.wanted: set[TierKey] | None = None
        self.ready: OrderedDict[TierKey, np.ndarray] = OrderedDict()
        self.complete = self.claimed = False
        self.until = until


class Outbox:
    """Parcels by ticket."""

    def __init__(self, lease: float = LEASE_SECONDS, most: int = MOST_BYTES) -> None:
        self._lease, self._most = lease, most
        self._parcels: dict[bytes, Parcel] = {}
        self._changed = threading.Condition()
        self._held = 0
        self._orphans: list[str] = []

    @property
    def held(self) -> int:
        """Bytes of blocks now."""
        return self._held

    def __len__(self) -> int:
        return len(self._parcels)

    # The engine's thread

    def open(self, ticket: bytes, request: str) -> bool:
        """Whether the ticket is one of now: it is refused if another request has it, or there are too many."""
        with self._changed:
            parcel = self._parcels.get(ticket)
            if parcel is None:
                if len(self._parcels) >= MOST_TICKETS:
                    return False
                parcel = self._parcels[ticket] = Parcel(time.monotonic() + self._lease)
            if parcel.request:
                return False
            parcel.request = request
            return True

    def wants(self, ticket: bytes, key: TierKey) -> bool:
        """Whether a block should be put."""
        with self._changed:
            parcel = self._parcels.get(ticket)
            return parcel is not None and (parcel.wanted is None or key in parcel.wanted)

    def put(self, ticket: bytes, key: TierKey, data: np.ndarray) -> None:
        """A block, which is kept as it is."""
        with self._changed:
            parcel = self._parcels.get(ticket)
            if parcel is not None and key not in parcel.ready:
                parcel.ready[key] = data
                self._held += data.nbytes
                self._changed.notify_all()

    def has_room(self, size: int) -> bool:
        return self._held + size <= self._most

    def finish(self, ticket: bytes) -> None:
        """Nothing more will be put. Idempotent."""
        with self._changed:
            if ticket in self._parcels:
                self._parcels[ticket].complete = True
                self._changed.notify_all()

    def is_open(self, ticket: bytes) -> bool:
        return ticket in self._parcels

    def expire(self) -> None:
        """Drop what nobody has fetched in time."""
        now = time.monotonic()
        with self._changed:
            for ticket in [ticket for ticket, parcel in self._parcels.items() if parcel.until <= now]:
                self._drop(ticket, orphan=True)

    def orphans(self) -> list[str]:
        """Ids of requests whose blocks nobody wants any more, since the last call."""
        with self._changed:
            orphans, self._orphans = self._orphans, []
            return orphans

    # A connection's thread

    def claim(self, ticket: bytes, wanted: Sequence[TierKey]) -> bool:
        """Somebody wants these of a ticket, known already or not -> whether it may: it is the first, and there are not
        too many."""
        with self._changed:
            parcel = self._parcels.get(ticket)
            if parcel is None:
                if len(self._parcels) >= MOST_TICKETS:
                    return False
                parcel = self._parcels[ticket] = Parcel(0.0)
            if parcel.claimed:
                return False
            parcel.claimed, parcel.wanted = True, set(wanted)
            parcel.until = time.monotonic() + self._lease
            for key in [key for key in parcel.ready if key not in parcel.wanted]:
                self._held -= parcel.ready.pop(key).nbytes
            return True

    def renew(self, ticket: bytes) -> None:
        """The one that claims it lives."""
        with self._changed:
            if ticket in self._parcels:
                self._parcels[ticket].until = time.monotonic() + self._lease

    def take(self, ticket: bytes, seconds: float) -> tuple[TierKey, np.ndarray] | str | None:
        """The next block of a ticket, within so many seconds; a text: why there will be no more; None: not yet."""
        with self._changed:
            if not self._next(ticket):
                self._changed.wait(seconds)
            return self._next(ticket, pop=True)

    def _next(self, ticket: bytes, pop: bool = False) -> tuple[TierKey, np.ndarray] | str | None:
        parcel = self._parcels.get(ticket)
        if parcel is None:
            return "the lease has run out"
        if parcel.ready:
            key = next(iter(parcel.ready))
            if not pop:
                return key, parcel.ready[key]
            data = parcel.ready.pop(key)
            self._held -= data.nbytes
            return key, data
        return "the request has ended before they were computed, or they had no room" if parcel.complete else None

    def end(self, ticket: bytes, served: bool) -> None:
        """It is over. Unless it has got what it asked for, a request that still computes for it is to be given up."""
        with self._changed:
            self._drop(ticket, orphan=not served)

    def opened(self, ticket: bytes) -> bool:
        """Whether its request has come."""
        with self._changed:
            return ticket in self._parcels and bool(self._parcels[ticket].request)

    def _drop(self, ticket: bytes, orphan: bool = False) -> None:
        parcel = self._parcels.pop(ticket, None)
        if parcel is not None:
            if orphan and parcel.request and not parcel.complete:
                self._orphans.append(parcel.request)
            self._held -= sum(data.nbytes for data in parcel.ready.values())
            self._changed.notify_all()

    def close(self) -> None:
        """Drop everything."""
        with self._changed:
            for ticket in list(self._parcels):
                self._drop(ticket)
