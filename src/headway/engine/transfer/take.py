"""The decode side: one thread for each prompt whose blocks come from another engine."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from headway.engine.transfer.give import BEAT_SECONDS, KEY
from headway.engine.transfer.outbox import LEASE_SECONDS
from headway.engine.transfer.shared import SharedSlots
from headway.engine.transfer.ticket import Way, host_port
from headway.engine.transfer.wire import MOST_CONTROL, Broken, FrameKind, Wire, greet

CONNECT_SECONDS = 2.0
MOST_AHEAD = 32 << 20  # bytes that were received and are not in the cache yet
LOOPBACK = ("127.0.0.1", "::1", "localhost")

Wanted = tuple[int, int, bytes]  # group, index in the prompt, name


class Pull:
    """Blocks of one prompt, as they come. Threads meet in `arrived` and `ended`; both are read by the engine's.

    Args:
        way: where they are.
        wanted: which.
        sizes: bytes of a block, per KV group.
        news: notified when something has come.

    Attributes:
        arrived: (group, index, bytes), in the order of their coming.
        ended: nothing more comes. problem: why not all came; "" = all did.
        shared: they come through shared memory.
    """

    def __init__(
        self, way: Way, wanted: Sequence[Wanted], secret: bytes, layout: bytes, sizes: Sequence[int],
        news: threading.Condition,
    ) -> None:  # fmt: skip
        self.arrived: deque[tuple[int, int, np.ndarray]] = deque()
        self.ended, self.problem = False, ""
        self.shared = False
        self.begin = time.monotonic()
        self._way, self._secret, self._layout, self._sizes, self._news = way, secret, layout, sizes, news
        self._index = {(group, name): index for group, index, name in wanted}
        self._ahead = 0
        self._stopped = False
        self._sock: socket.socket | None = None
        threading.Thread(target=self._run, name="kv-take", daemon=True).start()

    def stop(self) -> None:
        """Nobody waits for it any more. Idempotent."""
        with self._news:
            self._stopped = True
            self._news.notify_all()
        if self._sock is not None:
            with suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def next(self) -> tuple[int, int, np.ndarray] | None:
        """The next block that has come."""
        with self._news:
            if not self.arrived:
                return None
            one = self.arrived.popleft()
            self._ahead -= one[2].nbytes
            self._news.notify_all()
            return one

    def _run(self) -> None:
        problem = ""
        slots: SharedSlots | None = None
        try:
            host, port = host_port(self._way.source, "source")
            if host in LOOPBACK and self._index:
                slots = SharedSlots.make(max(self._sizes))
            with socket.create_connection((host, port), CONNECT_SECONDS) as sock:
                self._sock = sock
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                largest = max(MOST_CONTROL, max(self._sizes) + 64)
                wire = greet(sock, self._secret, self._layout, asks=True, largest=largest)
                sock.settimeout(LEASE_SECONDS)
                name = b"" if slots is None else slots.name.encode()
                keys = b"".join(KEY.pack(group, name) for group, name in self._index)
                wire.send(FrameKind.ASK, self._way.ticket, name + b"\0", keys)
                problem = self._receive(wire, slots)
        except Broken as error:
            problem = str(error)
        except Exception as error:  # whatever it is, the prompt is computed here
            problem = f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
        finally:
            if slots is not None:
                slots.close()
            with self._news:
                self.ended, self.problem = True, problem
                self._news.notify_all()

    def _receive(self, wire: Wire, slots: SharedSlots | None) -> str:
        """Until the last block -> why not all came."""
        left = dict(self._index)
        heard = beaten = time.monotonic()
        while True:
            if (now := time.monotonic()) > beaten + BEAT_SECONDS:
                beaten = now
                wire.send(FrameKind.BEAT)
            if self._stopped:
                return "it was given up"
            if not wire.waiting(BEAT_SECONDS / 2):
                if now > heard + LEASE_SECONDS:
                    return "nothing was heard of the other for the time of the lease"
                continue
            kind, payload = wire.receive()
            heard = time.monotonic()
            if kind is FrameKind.DONE:
                return "" if not left else "it says that all was sent, and it was not"
            if kind is FrameKind.MISSING:
                return bytes(payload[:200]).decode(errors="replace")
            if kind in (FrameKind.BLOCK, FrameKind.SHARED) and len(payload) >= KEY.size:
                group, name = KEY.unpack_from(payload)
                if (group, name) not in left:
                    raise Broken("it sends a block that nobody asked for")
                data = self._block(wire, kind, payload, self._sizes[group], slots)
                self._keep(wire, group, left.pop((group, name)), data)
            elif kind is not FrameKind.BEAT:
                raise Broken("it says something that nobody asked for")

    def _block(
        self, wire: Wire, kind: FrameKind, payload: memoryview, size: int, slots: SharedSlots | None
    ) -> np.ndarray:  # fmt: skip
        head, rest = payload[: KEY.size], payload[KEY.size :]
        if kind is FrameKind.BLOCK:
            data = np.frombuffer(rest, np.uint8)
        else:
            if slots is None or len(rest) != 20:
                raise Broken("it names shared memory that there is not")
            slot = int.from_bytes(rest[:4], "little")
            try:
                copy = slots.read(slot, size)
            except ValueError:
                raise Broken("it names a slot that there is not") from None
            if wire.checksum(head, copy) != rest[4:]:
                raise Broken("a block in shared memory is not what was sent")
            self.shared = True
            data = np.frombuffer(copy, np.uint8)
            wire.send(FrameKind.FREE, slot.to_bytes(4, "little"))
        if data.nbytes != size:
            raise Broken(f"a block has {data.nbytes} bytes, not {size}")
        return data

    def _keep(self, wire: Wire, group: int, index: int, data: np.ndarray) -> None:
        """Wait for room, showing signs of life meanwhile."""
        with self._news:
            while self._ahead > MOST_AHEAD and not self._stopped:
                self._news.wait(BEAT_SECONDS)
                wire.send(FrameKind.BEAT)
            self.arrived.append((group, index, data))
            self._ahead += data.nbytes
            self._news.notify_all()
