"""What a message between the GPUs of one replica costs: all-reduce by kind, priced as floor + hops + traffic (B7).

    seconds(M, n) = max(host, floor + per_gpu * n + hops(n) * alpha + traffic(n) * M / bandwidth)

A ring passes n chunks around twice: 2(n-1) hops, 2(n-1)/n of the message per GPU. A one-shot kernel reads every peer's
message at once: one hop, (n-1) messages per GPU; it wins while messages are small. The textbook has alpha only. The
presets put measured constants in its place, one set per way of calling: `floor` and `per_gpu` are what a call costs
before bytes count, `host` is what launching it from Python takes when no graph was captured (it hides the rest below
it). `benchmarks/collectives.py` holds the presets against measurements; docs/collectives.md has the result.
"""

from __future__ import annotations

import msgspec

from headway.core.errors import BadInput
from headway.roofline.hardware import Hardware, Link
from headway.roofline.work import larger

KINDS = ("ring", "one-shot")
SERVED = "served"  # as engines run them: `served_all_reduce`
US = 1e-6


class AllReduce(msgspec.Struct, frozen=True):
    """One way to sum a message over n GPUs.

    Attributes:
        kind: "ring" or "one-shot".
        bandwidth: bytes/s one GPU sends in one direction while reducing.
        alpha: seconds per hop.
        floor, per_gpu: seconds per call, and per call and GPU.
        host: seconds a call takes at least.
        limit: bytes up to which this way is used at all; 0 = any.
    """

    kind: str
    bandwidth: float
    alpha: float = 0.0
    floor: float = 0.0
    per_gpu: float = 0.0
    host: float = 0.0
    limit: float = 0.0

    def seconds(self, message: float, gpus: float) -> float:
        """Seconds to all-reduce `message` bytes over `gpus` (B7; 0 for one GPU or no bytes), or arrays of both."""
        if self.kind == "one-shot":
            hops, traffic = 1.0, gpus - 1.0
        else:
            hops, traffic = 2.0 * (gpus - 1), 2.0 * (gpus - 1) / gpus
        moved = self.floor + self.per_gpu * gpus + hops * self.alpha + traffic * message / self.bandwidth
        return larger(self.host, moved) * (gpus > 1) * (message > 0)


class Fastest(msgspec.Struct, frozen=True):
    """Engines pick per message: the quickest of several ways, each within its size limit."""

    ways: tuple[AllReduce, ...]

    def seconds(self, message: float, gpus: float) -> float:
        """Seconds of the quickest; floats only."""
        times = [way.seconds(message, gpus) for way in self.ways if not way.limit or message <= way.limit]
        return min(times) if times else 0.0


def all_reduce_of(kind: str, link_bandwidth: float, alpha: float) -> AllReduce:
    """A textbook all-reduce by name, without a floor; the ring: 2(n-1) alpha + 2(n-1)/n * M / B_link (B7).

    Raises:
        BadInput: neither "ring" nor "one-shot".
    """
    if kind not in KINDS:
        raise BadInput("--all-reduce", f"{kind!r}; accepted: {', '.join((*KINDS, SERVED))}")
    return AllReduce(kind, link_bandwidth, alpha)


def measured_ring(link: Link) -> AllReduce:
    """A ring as NCCL runs it inside a captured graph: three quarters of the link, and a start-up that grows with the
    ring."""
    return AllReduce("ring", 0.75 * usable(link), floor=14 * US, per_gpu=1.5 * US)


def measured_one_shot(link: Link) -> AllReduce:
    """Small messages read straight from every peer (NCCL's low-latency protocol and the engines' own kernels)."""
    return AllReduce("one-shot", usable(link), floor=5 * US, per_gpu=1.5 * US, limit=float(1 << 20))


NODE_HOP = 4.0  # latency of a ring between nodes over that of one inside: assumed, like the planner's prior


def served_all_reduce(hardware: Hardware, gpus: int = 1) -> Fastest | None:
    """What an engine with captured graphs gets on this device's links; None without links. More GPUs than one group
    has go round at the nodes' ports."""
    if hardware.link is None:
        return None
    ring = measured_ring(hardware.link)
    if hardware.crosses_nodes(gpus):
        slower = min(ring.bandwidth, 0.75 * hardware.reach(gpus))
        return Fastest((AllReduce("ring", slower, floor=NODE_HOP * ring.floor, per_gpu=ring.per_gpu),))
    return Fastest((measured_one_shot(hardware.link), ring))


# Share of a link's label that reductions see before a preset's own efficiency: NVLink 3 runs under its later
# generations in the A100 tables; PCIe 3 boards without peer access stage every byte through host memory.
LINK_SHARE = {"NVLink3": 0.75, "PCIe3": 0.33}


def usable(link: Link) -> float:
    """Bytes/s one GPU sends to its neighbours while all do."""
    return link.bandwidth * next((share for name, share in LINK_SHARE.items() if link.name.startswith(name)), 1.0)
