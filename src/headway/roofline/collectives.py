"""What a message between the GPUs of one replica costs: all-reduce by kind, priced as floor + hops + traffic (B7).

    seconds(M, n) = floor + hops(n) * alpha + traffic(n) * M / bandwidth

A ring passes n chunks around twice: 2(n-1) hops, 2(n-1)/n of the message per GPU. A one-shot kernel reads every
peer's message at once: one hop, (n-1) messages per GPU; it wins while messages are small. `floor` is what one call
costs before any byte moves: nothing in the textbook, a kernel launch in a CUDA graph, the host's path in eager mode.
"""

from __future__ import annotations

import msgspec

from headway.core.errors import BadInput


class AllReduce(msgspec.Struct, frozen=True):
    """One way to sum a message over n GPUs.

    Attributes:
        kind: "ring" or "one-shot".
        bandwidth: bytes/s one GPU sends in one direction while reducing.
        alpha: seconds per hop.
        floor: seconds per call.
        limit: bytes up to which this way is used at all; 0 = any.
    """

    kind: str
    bandwidth: float
    alpha: float
    floor: float = 0.0
    limit: float = 0.0

    def seconds(self, message: float, gpus: int) -> float:
        """Seconds to all-reduce `message` bytes over `gpus` (B7; 0 for one GPU or no bytes)."""
        if gpus <= 1 or message <= 0:
            return 0.0
        if self.kind == "one-shot":
            hops, traffic = 1.0, gpus - 1.0
        else:
            hops, traffic = 2.0 * (gpus - 1), 2.0 * (gpus - 1) / gpus
        return self.floor + hops * self.alpha + traffic * message / self.bandwidth


def textbook_ring(link_bandwidth: float, alpha: float) -> AllReduce:
    """The text's ring: 2(n-1) alpha + 2(n-1)/n * M / B_link, no floor."""
    return AllReduce("ring", link_bandwidth, alpha)


class Fastest(msgspec.Struct, frozen=True):
    """Engines pick per message: the quickest of several ways, each within its size limit."""

    ways: tuple[AllReduce, ...]

    def seconds(self, message: float, gpus: int) -> float:
        times = [way.seconds(message, gpus) for way in self.ways if not way.limit or message <= way.limit]
        return min(times) if times else 0.0


def all_reduce_of(kind: str, link_bandwidth: float, alpha: float) -> AllReduce:
    """A textbook all-reduce by name.

    Raises:
        BadInput: neither "ring" nor "one-shot".
    """
    if kind not in ("ring", "one-shot"):
        raise BadInput("--all-reduce", f"{kind!r}; accepted: ring, one-shot")
    return AllReduce(kind, link_bandwidth, alpha)
