"""The prefill side's door: engines that know the secret of the pool fetch blocks by ticket."""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from headway.cache.tier import TierKey
from headway.core.errors import BadInput
from headway.engine.transfer.outbox import LEASE_SECONDS, Outbox
from headway.engine.transfer.shared import SLOTS, SharedSlots
from headway.engine.transfer.ticket import TICKET_BYTES
from headway.engine.transfer.wire import MOST_CONTROL, Broken, FrameKind, Wire, greet

BEAT_SECONDS = 0.5
OPEN_SECONDS = 2.0  # within which the request of a ticket must have come, once somebody asks for it
HELLO_SECONDS = 2.0
MOST_CONNECTIONS = 256
KEY = struct.Struct("<I16s")  # group, name

logger = logging.getLogger(__name__)


class Giver:
    """Listens until it is closed.

    Args:
        address: host and port; 0 = a free one.
        sizes: bytes of a block, per KV group.
        tried: is given (blocks, bytes, seconds, problem) of everything that was asked for.

    Attributes:
        address: host and port where it listens.

    Raises:
        BadInput: it cannot listen there.
    """

    def __init__(
        self, address: tuple[str, int], secret: bytes, layout: bytes, sizes: Sequence[int], outbox: Outbox,
        tried: deque[tuple[int, int, float, str]],
    ) -> None:  # fmt: skip
        self._secret, self._layout, self._sizes = secret, layout, sizes
        self._outbox, self._tried = outbox, tried
        try:
            family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
            self._sock = socket.create_server(address, family=family, backlog=MOST_CONNECTIONS)
        except (OSError, UnicodeError) as error:
            problem = getattr(error, "strerror", None) or error
            raise BadInput("--kv-listen", f"{address[0]}:{address[1]}: {problem}") from None
        self.address: tuple[str, int] = self._sock.getsockname()[:2]
        self._sock.settimeout(BEAT_SECONDS)
        self._open: set[socket.socket] = set()
        self._closing = False
        threading.Thread(target=self._accept, name="kv-give", daemon=True).start()

    def _accept(self) -> None:
        while not self._closing:
            self._outbox.expire()
            try:
                sock, _ = self._sock.accept()
            except OSError:  # nobody came, or it is closed
                continue
            if len(self._open) >= MOST_CONNECTIONS:
                sock.close()
                continue
            self._open.add(sock)
            threading.Thread(target=self._serve, args=(sock,), name="kv-give-one", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(HELLO_SECONDS)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            wire = greet(sock, self._secret, self._layout, asks=False, largest=MOST_CONTROL)
            sock.settimeout(LEASE_SECONDS)
            ticket, name, wanted = self._asked(*wire.receive())
            if self._outbox.claim(ticket, wanted):
                self._give(wire, ticket, name, wanted)
            else:
                wire.send(FrameKind.MISSING, b"the ticket was used already, or there are too many")
            linger(wire)
        except (Broken, OSError) as error:
            logger.info("a connection for cache blocks ended: %s", error)
        finally:
            self._open.discard(sock)
            sock.close()

    def _asked(self, kind: FrameKind, payload: memoryview) -> tuple[bytes, str, list[TierKey]]:
        """Ticket, shared memory and blocks of the first frame."""
        data = bytes(payload)
        name, zero, keys = data[TICKET_BYTES:].partition(b"\0")
        if kind is not FrameKind.ASK or not zero or len(keys) % KEY.size:
            raise Broken("it begins with something that is no question")
        wanted = [TierKey(named, group) for group, named in KEY.iter_unpack(keys)]
        if any(key.group >= len(self._sizes) for key in wanted):
            raise Broken("it asks for a KV group that there is not")
        return data[:TICKET_BYTES], name.decode("latin-1"), wanted

    def _give(self, wire: Wire, ticket: bytes, name: str, wanted: Sequence[TierKey]) -> None:
        slots = SharedSlots.open(name, max(self._sizes)) if name else None
        giving = _Giving(wire, self._outbox, ticket, slots)
        problem = "the connection broke"
        try:
            problem = giving.run(len(set(wanted)))
        except Broken as error:
            problem = str(error)
            raise
        finally:
            self._outbox.end(ticket, served=bool(wanted) and not problem)
            self._tried.append((giving.blocks, giving.bytes, time.monotonic() - giving.begin, problem))
            if slots is not None:
                slots.close()

    def close(self) -> None:
        """End all connections. Idempotent."""
        self._closing = True
        self._sock.close()
        for sock in list(self._open):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def linger(wire: Wire) -> None:
    """Until the other closes the connection, or its lease ends: closed earlier, it could lose what was sent last."""
    with suppress(Broken):
        while wire.waiting(LEASE_SECONDS):
            wire.receive()


class _Giving:
    """One ticket's blocks on their way to who asked for them."""

    def __init__(self, wire: Wire, outbox: Outbox, ticket: bytes, slots: SharedSlots | None) -> None:
        self._wire, self._outbox, self._ticket, self._slots = wire, outbox, ticket, slots
        self._free = list(range(SLOTS))
        self.blocks = self.bytes = 0
        self.begin = self._heard = self._beaten = time.monotonic()

    def run(self, count: int) -> str:
        """Give `count` blocks -> why it could not; "" = it has.

        Raises:
            Broken: the other has gone.
        """
        while self.blocks < count:
            self._listen(0.0)
            if self._slots is not None and not self._free:
                self._listen(BEAT_SECONDS)
                continue
            found = self._outbox.take(self._ticket, 0.1)
            now = time.monotonic()
            if found is None and not self._outbox.opened(self._ticket) and now > self.begin + OPEN_SECONDS:
                found = "its request has not come"
            if isinstance(found, str):
                self._wire.send(FrameKind.MISSING, found.encode())
                return found
            if found is not None:
                self._send(*found)
            elif now > self._beaten + BEAT_SECONDS:
                self._beaten = now
                self._wire.send(FrameKind.BEAT)
        self._wire.send(FrameKind.DONE)
        return ""

    def _listen(self, seconds: float) -> None:
        while self._wire.waiting(seconds):
            kind, payload = self._wire.receive()
            self._heard, seconds = time.monotonic(), 0.0
            self._outbox.renew(self._ticket)
            if kind is FrameKind.FREE and len(payload) == 4:
                slot = int.from_bytes(payload, "little")
                if slot >= SLOTS or slot in self._free:
                    raise Broken("it gives back a slot that it does not have")
                self._free.append(slot)
            elif kind is not FrameKind.BEAT:
                raise Broken("it says something that nobody asked for")
        if time.monotonic() > self._heard + LEASE_SECONDS:
            raise Broken("nothing was heard of it for the time of its lease")

    def _send(self, key: TierKey, data: np.ndarray) -> None:
        head, body = KEY.pack(key.group, key.name), data.data
        if self._slots is None:
            self._wire.send(FrameKind.BLOCK, head, body)
        else:
            slot = self._free.pop()
            self._slots.write(slot, body)
            self._wire.send(FrameKind.SHARED, head, slot.to_bytes(4, "little"), self._wire.checksum(head, body))
        self.blocks += 1
        self.bytes += data.nbytes
