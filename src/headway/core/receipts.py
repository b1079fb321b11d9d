"""Who pays for the machine's time: a fold over events that shares every step among its rows.

    wall time = idle + steps           a step = its fixed part, by rows + each row's own tokens, logits, keys and pairs

A step-time model says in which proportion (`StepParts`); what is shared is the time that was measured, in whole
picoseconds, so the receipts and the idle time of a run add up to its wall time exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import msgspec

from headway.core.events import Admitted, AnyEvent, Finished, Preempted, Queued, StepDone
from headway.core.step import StepShape, keys_read, pairs_computed


def dollars(seconds: float, per_hour: float) -> float:
    """What so much of a machine costs that has a price per hour."""
    return seconds * per_hour / 3600


class StepParts(NamedTuple):
    """Seconds of a step by what they grow with, as a step-time model sees them.

    Attributes:
        fixed: whoever takes part: reading weights, starting kernels.
        row, token, logit: for each row, each new token, each row that draws one.
        decode: per KV group, for each cached key that a row with one new token reads.
        keys, pairs: per KV group, for each cached key and each query-key pair of a row with several.
    """

    fixed: float = 0.0
    row: float = 0.0
    token: float = 0.0
    logit: float = 0.0
    decode: tuple[float, ...] = ()
    keys: tuple[float, ...] = ()
    pairs: tuple[float, ...] = ()

    def own(self, start: int, count: int, draws: bool, windows: Sequence[int | None]) -> float:
        """Seconds that a row adds to a step by computing tokens [start, start + count)."""
        seconds = self.row + self.token * count + self.logit * draws
        if count == 1:
            return seconds + sum(
                rate * keys_read(start, 1, window) for rate, window in zip(self.decode, windows, strict=True)
            )
        for window, key, pair in zip(windows, self.keys, self.pairs, strict=True):
            seconds += key * keys_read(start, count, window) + pair * pairs_computed(start, count, window)
        return seconds

    def own_decodes(self, starts: Sequence[int], windows: Sequence[int | None]) -> list[float]:
        """`own` of rows that compute one token each, and draw the next."""
        if tuple(windows) != (None,):
            return [self.own(start, 1, True, windows) for start in starts]
        alike, rate = self.row + self.token + self.logit, self.decode[0]
        return [alike + rate * (start + 1) for start in starts]


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """What one choice of a request took of the machine. Times in ps.

    Attributes:
        queue: it waited for cache blocks, again after preemptions; costs nothing.
        prefill, decode: its share of the steps up to its first token (again after a preemption), and of those after it;
            what it pays for.
        stalls: what its steps took longer because other rows had work of their own in them.
        computed, cached: tokens computed for it, and those that the cache saved it at first.
        tenant: whose it is.
    """

    queue: int = 0
    prefill: int = 0
    decode: int = 0
    stalls: int = 0
    computed: int = 0
    cached: int = 0
    tenant: str = ""

    @property
    def billed(self) -> int:
        """Its share of the machine's time, ps."""
        return self.prefill + self.decode

    def __add__(self, other: Receipt) -> Receipt:
        return Receipt(
            self.queue + other.queue, self.prefill + other.prefill, self.decode + other.decode,
            self.stalls + other.stalls, self.computed + other.computed, self.cached + other.cached, self.tenant,
        )  # fmt: skip


@dataclass(slots=True)
class _Account:
    """A receipt that is still being written."""

    number: int
    tenant: str
    waits_from: int  # ps, while it waits
    computed: int = 0  # tokens it has in the cache
    answering: bool = False  # its first token is out
    queue: int = 0
    prefill: int = 0
    decode: int = 0
    stalls: int = 0
    worked: int = 0
    cached: int = 0

    def receipt(self) -> Receipt:
        return Receipt(self.queue, self.prefill, self.decode, self.stalls, self.worked, self.cached, self.tenant)


class Receipts:
    """The fold. Requests that were there before its first event are billed nothing: their share counts as idle.

    Args:
        parts: what a step of a shape is made of, in any unit: only the proportions count.
        windows: of each KV group, as in `Capabilities`.

    Attributes:
        idle: ps that no step ran, or one whose row had ended before it.
        wall: ps from the first event that was seen to the last step's end.
    """

    def __init__(self, parts: Callable[[StepShape], StepParts], windows: Sequence[int | None]) -> None:
        self.idle = 0
        self.wall = 0
        self._parts = parts
        self._windows = windows
        self._last: int | None = None  # up to when time has been given out
        self._live: dict[str, _Account] = {}
        self._by_number: dict[int, _Account] = {}
        self._ended: dict[str, _Account] = {}  # since the last step, which may still name them

    def __call__(self, event: AnyEvent) -> None:
        if self._last is None:
            self._last = event.now
        match event:
            case StepDone():
                self._share(event, self._last)
            case Queued():
                account = _Account(event.number, str(event.tenant), event.now)
                self._live[event.id] = self._by_number[event.number] = account
            case Admitted() if event.id in self._live:
                account = self._live[event.id]
                account.computed, account.answering = event.cached, False
                first = event.preemptions == 0
                account.queue += event.waited if first else event.now - account.waits_from
                account.cached = event.cached if first else account.cached
            case Preempted() if event.id in self._live:
                self._live[event.id].waits_from = event.now
            case Finished() if event.id in self._live:
                account = self._ended[event.id] = self._live.pop(event.id)
                if not account.worked and not account.queue:
                    account.queue = event.lived

    def take(self, id: str, tenant: str = "") -> Receipt:
        """The receipt of a choice that has ended, once; ask after the step it ended with was committed."""
        account = self._ended.pop(id, None)
        if account is None:
            return Receipt(tenant=tenant)
        self._by_number.pop(account.number, None)
        return msgspec.structs.replace(account.receipt(), tenant=tenant or account.tenant)

    def take_all(self) -> Iterator[tuple[str, Receipt]]:
        """(id, receipt) of every choice that has ended and was not taken."""
        for id in list(self._ended):
            yield id, self.take(id)

    def open(self) -> Iterator[tuple[str, Receipt]]:
        """(id, receipt so far) of every choice that lives."""
        return ((id, account.receipt()) for id, account in self._live.items())

    def _share(self, event: StepDone, last: int) -> None:
        begin = min(max(event.planned, last), event.now)
        self.wall += event.now - last
        self.idle += begin - last
        self._last = event.now
        if not event.rows:  # a step that only tells the executor what has ended
            self.idle += event.now - begin
            return
        parts = self._parts(event.shape)
        accounts = [self._by_number.get(number) for number in event.rows]
        own = self._own(event, parts, accounts)
        fixed = parts.fixed / max(1, len(own))
        whole, busy = parts.fixed + sum(own), event.now - begin
        scale = busy / whole if whole > 0 else 0.0
        ends = [round(busy * share) for share in _rising([fixed + mine for mine in own])]
        varying, first = whole - parts.fixed, 0
        for account, mine, count, emitted, end in zip(accounts, own, event.counts, event.emitted, ends, strict=True):
            share, first = end - first, end
            if account is None:
                self.idle += share
                continue
            account.stalls += round(scale * (varying - mine))
            account.worked += count
            if account.answering:
                account.decode += share
                account.computed += emitted  # drafts that were not accepted are gone
            else:
                account.prefill += share
                account.computed += count
                account.answering = emitted > 0
        if not event.rows:
            self.idle += busy

    def _own(self, event: StepDone, parts: StepParts, accounts: Sequence[_Account | None]) -> list[float]:
        """What each row added to a step; of rows that nobody is billed for, nothing."""
        known = [account for account in accounts if account is not None]
        if len(known) == len(accounts) and min(event.emitted, default=0) > 0 and event.counts == (1,) * len(accounts):
            return parts.own_decodes([account.computed for account in known], self._windows)
        return [
            0.0 if one is None else parts.own(one.computed, count // event.steps, emitted > 0, self._windows)
            for one, count, emitted in zip(accounts, event.counts, event.emitted, strict=True)
        ]


def _rising(weights: Sequence[float]) -> list[float]:
    """Running sums as shares of the whole, the last one 1; equal shares where nothing weighs anything."""
    total = sum(weights)
    if total <= 0:
        return [(index + 1) / len(weights) for index in range(len(weights))]
    return [*(part / total for part in list(accumulate(weights))[:-1]), 1.0]
