"""What stands before simulated replicas: the router that serves, told what happens to requests as a proxy would be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headway.cache.hashing import BlockHasher
from headway.core.errors import BadInput
from headway.roofline.step import StepTime, prefill_step
from headway.routing.policies import routing_named
from headway.routing.replica import PrefillSeconds, per_token
from headway.routing.request import RoutedRequest
from headway.routing.router import RequestRouter
from headway.scheduling.state import Emission
from headway.shape.model import ModelShape
from headway.simulate.workload import Ask

UNBOUNDED = 1 << 62


class Sent(NamedTuple):
    """A request goes to a replica."""

    ask: Ask
    replica: int


class Front:
    """A router before replicas, which are numbered from 0 and named by their numbers.

    Args:
        policy: name of a routing policy.
        replicas: how many there are at first, all equal.
        prefill: seconds until the first token, by tokens cached and of the prompt.
        blocks, block_size: of each replica's cache.
        most: requests that a replica has at once; the others wait at the router. None = any number.

    Raises:
        BadInput: there is no such policy.
    """

    def __init__(
        self, policy: str, replicas: int, prefill: PrefillSeconds | None = None, *, blocks: int = 0,
        block_size: int = 32, most: int | None = None,
    ) -> None:  # fmt: skip
        if most is not None and most < 1:
            raise BadInput("--most-in-flight", f"{most} is not a whole number from 1")
        chosen = routing_named(policy, "--router")
        self.router = RequestRouter(chosen, most_waiting=UNBOUNDED, heartbeat=None)
        self._most = most
        self._hasher = BlockHasher(block_size, b"") if chosen.reads_blocks and blocks else None
        self._asks: dict[str, Ask] = {}  # that wait at the router, by id
        for number in range(replicas):
            self.join(number, prefill or per_token(1.0), blocks)

    def join(self, number: int, prefill: PrefillSeconds, blocks: int) -> None:
        """Another replica, with the next number."""
        self.router.join(str(number), prefill, most=self._most, blocks=blocks)

    def offer(self, ask: Ask, now: int) -> list[Sent]:
        """A request arrives -> which go where now.

        Raises:
            Rejected: no replica is up, and none will be.
        """
        names: Sequence[bytes] = ()
        block_tokens = 0
        if self._hasher is not None:
            names, block_tokens = self._hasher.chain(self._hasher.root(ask.tenant, ""), ask.prompt), self.block_size
        id = str(ask.number)
        self.router.offer(RoutedRequest(id, len(ask.prompt), names, block_tokens, session=ask.session, arrival=now))
        self._asks[id] = ask
        return self.sent(now)

    @property
    def block_size(self) -> int:
        return self._hasher.block_size if self._hasher is not None else 0

    def heard(self, emission: Emission, now: int) -> list[Sent]:
        """Something happened to a request at its replica -> which go where now."""
        id = emission.request.id
        if emission.tokens and not self.router.live[id].begun:
            self.router.begin(id, now)
        return self.over(id, now) if emission.finish is not None else []

    def over(self, id: str, now: int) -> list[Sent]:
        """A request has ended, or its replica refuses it -> which go where now."""
        self.router.end(id, now)
        return self.sent(now)

    def failed(self, ask: Ask, now: int) -> bool:
        """The replica that had a request has failed it -> whether it waits for another one; if not it is over."""
        again = self.router.fail(str(ask.number), now)
        if again:
            self._asks[str(ask.number)] = ask
        return again

    def abandoned(self, now: int) -> list[Ask]:
        """Those that nobody is left for: they are over."""
        return [self._asks.pop(request.id) for request in self.router.expired(now)]

    def sent(self, now: int) -> list[Sent]:
        """Which of those that wait go where now."""
        placed = self.router.dispatch(now)
        return [Sent(self._asks.pop(one.request.id), one.replica.number) for one in placed]


def prefill_seconds(model: StepTime, shape: ModelShape, chunk: int) -> PrefillSeconds:
    """Of a prompt computed alone in steps of at most `chunk` tokens, by the one step-time model."""

    def seconds(cached: int, tokens: int) -> float:
        total, at = 0.0, min(cached, tokens - 1)
        while at < tokens:
            count = min(chunk, tokens - at)
            total += model.predict(prefill_step(shape, count, at))
            at += count
        return total

    return seconds
