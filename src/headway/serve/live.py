"""What the live page shows: what an engine holds, ten times a second, and what happened in between.

Nobody looks: nothing is kept, and the engine is never asked. Somebody looks: the engine is asked between two steps, as
seldom as needed for it to spend no more than a fiftieth of its time on answers; all who look share one answer.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from headway.core import events
from headway.core.clock import to_seconds
from headway.core.errors import EngineDead
from headway.core.receipts import Receipt
from headway.engine.ipc import Looked, Turn
from headway.engine.messages import Delta, Look
from headway.engine.picture import Picture, RowPicture
from headway.serve.encode import event as server_event
from headway.serve.errors import ApiError
from headway.serve.hosted import HostedModel, Phase
from headway.serve.receipts import itemised

PERIOD = 0.1  # seconds between two samples, at least
SHARE = 50  # of its time, an engine spends one in so many on being looked at, at most
MOST_EVENTS = 4096  # kept for a watcher that reads slowly
MOST_WATCHERS = 16  # of a model
MOST_OF_A_KEY = 4

Fields = dict[str, Any]


class Eye:
    """The newest picture of an engine, for all who look at it."""

    def __init__(self, model: HostedModel) -> None:
        self.model = model
        self.watchers: Counter[str] = Counter()  # by tenant
        self._picture: Picture | None = None
        self._taken = 0.0
        self._asking: asyncio.Task[Picture] | None = None

    async def look(self) -> Picture:
        """
        Raises:
            EngineDead: there is no engine.
        """
        if self._picture is not None and time.monotonic() < self._taken + self._pause:
            return self._picture
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return await asyncio.shield(self._asking)

    @property
    def _pause(self) -> float:
        return 0.0 if self._picture is None else max(PERIOD / 2, SHARE * self._picture.seconds)

    async def _ask(self) -> Picture:
        answer = await self.model.link.ask(Look(secrets.token_hex(8)))
        assert isinstance(answer, Looked)
        self._picture, self._taken = answer.picture, time.monotonic()
        return answer.picture


class Watcher:
    """What one key is told of an engine: all that happens, but of other keys' requests neither ids nor bills.

    Args:
        price: dollars per hour, for bills.
    """

    def __init__(self, model: HostedModel, tenant: str, price: float | None) -> None:
        self._link = model.link
        self._tenant = tenant
        self._price = price
        self._numbers: dict[str, int] = {}
        self._own: set[int] = set()  # of them, this key's
        self._ended: list[str] = []
        self._told: deque[Fields] = deque(maxlen=MOST_EVENTS)

    def fold(self, turn: Turn) -> None:
        """Keep what a turn brought."""
        for id in self._ended:
            self._own.discard(self._numbers.pop(id, -1))
        self._ended.clear()
        for event in turn.events:
            told = self._event(event)
            if told is not None:
                self._told.append(told | {"t": to_seconds(event.now)})
        for output in turn.outputs:
            if isinstance(output, Delta) and output.receipt is not None:
                self._receipt(output, output.receipt)

    def take(self, picture: Picture) -> Fields:
        """A sample: the picture, and what happened since the last one."""
        self._numbers |= {row.id: row.number for row in picture.rows}
        self._own |= {row.number for row in picture.rows if row.tenant == self._tenant}
        told = list(self._told)
        self._told.clear()
        shown = msgspec.to_builtins(msgspec.structs.replace(picture, rows=()))
        return {**shown, "rows": [self._row(row) for row in picture.rows], "events": told}

    def _row(self, row: RowPicture) -> Fields:
        fields: Fields = msgspec.to_builtins(row)
        own = row.number in self._own
        del fields["tenant"]
        return {**fields, "own": own, "id": row.id if own else None, "blocks": [_runs(ids) for ids in row.blocks]}

    def _event(self, event: events.AnyEvent) -> Fields | None:
        match event:
            case events.Queued():
                self._numbers[event.id] = event.number
                own = self._link.tenant_of(event.id.partition("#")[0]) == self._tenant
                if own:
                    self._own.add(event.number)
                return {
                    "k": "queued", "n": event.number, "id": event.id if own else None, "own": own,
                    "prompt": event.prompt_tokens, "max_len": event.max_len,
                }  # fmt: skip
            case events.Admitted():
                return self._of(event.id, "admitted", cached=event.cached, preemptions=event.preemptions)
            case events.FirstToken():
                return self._of(event.id, "first", waited=to_seconds(event.waited))
            case events.Preempted():
                return self._of(event.id, "preempted", wasted=event.wasted)
            case events.Finished():
                self._ended.append(event.id)
                return self._of(
                    event.id, "finished", reason=event.reason, prompt=event.prompt_tokens, cached=event.cached,
                    generated=event.generated, lived=to_seconds(event.lived),
                )  # fmt: skip
            case events.StepDone():
                return {
                    "k": "step", "step": event.step, "steps": event.steps, "t0": to_seconds(event.planned),
                    "rows": event.rows, "counts": event.counts, "emitted": event.emitted, "predicted": event.predicted,
                    "measured": event.seconds.executor / event.steps, "drafted": event.drafted,
                    "accepted": event.accepted,
                }  # fmt: skip
        return None

    def _of(self, id: str, kind: str, **fields: Any) -> Fields | None:
        number = self._numbers.get(id)
        return None if number is None else {"k": kind, "n": number, **fields}

    def _receipt(self, output: Delta, receipt: Receipt) -> None:
        number = self._numbers.get(f"{output.id}#{output.choice}" if output.choice else output.id)
        if number in self._own:
            bill = itemised(receipt, self._price)
            self._told.append({"k": "receipt", "n": number, "t": to_seconds(output.at), **bill})


def _runs(ids: Sequence[int]) -> list[int]:
    """Block ids as runs: first, how many, first, how many..."""
    runs: list[int] = []
    for id in ids:
        if runs and runs[-2] + runs[-1] == id:
            runs[-1] += 1
        else:
            runs += [id, 1]
    return runs


class LiveStream:
    """An ASGI response: samples until the client leaves or the model no longer serves.

    Raises:
        ApiError: 429, too many look already.
    """

    def __init__(self, eye: Eye, tenant: str, price: float | None) -> None:
        full = f"{MOST_WATCHERS} already look at this model" if eye.watchers.total() >= MOST_WATCHERS else ""
        if tenant and eye.watchers[tenant] >= MOST_OF_A_KEY:
            full = f"{MOST_OF_A_KEY} with this key already look at this model"
        if full:
            raise ApiError(429, full, code="rate_limit_exceeded", retry_after=10)
        self._eye, self._tenant = eye, tenant
        self._watcher = Watcher(eye.model, tenant, price)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watchers = self._eye.model.link.watchers
        watchers.add(self._watcher.fold)
        self._eye.watchers[self._tenant] += 1
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            watchers.discard(self._watcher.fold)
            self._eye.watchers[self._tenant] -= 1
            leaving.cancel()
            sending.cancel()
        if sending.done() and not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]
        headers.append((b"x-accel-buffering", b"no"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        while self._eye.model.current_phase is Phase.READY:
            try:
                sample = self._watcher.take(await self._eye.look())
            except EngineDead:
                break
            await send({"type": "http.response.body", "body": server_event(sample), "more_body": True})
            await asyncio.sleep(PERIOD)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
