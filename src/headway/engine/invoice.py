"""A day's invoice: the receipts of an event log, by tenant or by request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from headway.core.clock import to_seconds
from headway.core.errors import BadInput
from headway.core.events import Finished, Header, Queued, StepDone
from headway.core.receipts import Receipt, Receipts, StepParts, dollars
from headway.core.step import StepShape
from headway.engine.event_file import read_events, read_header
from headway.engine.profile import recorded_regimes
from headway.roofline.fixed import FixedCosts
from headway.shape.model import ModelShape


class Line(msgspec.Struct, frozen=True):
    """What a tenant, or one choice of a request, took. Times in seconds; `dollars` is None without a price.

    Attributes:
        name: the request's id, or the tenant's number in order of appearance.
        requests: choices.
        prompt_tokens, cached_tokens, computed_tokens, generated_tokens: as the events say; a prompt whose n choices
            share it counts n times.
        queue, prefill, decode, stalls: as in `Receipt`.
        seconds: of the machine: prefill and decode.
    """

    name: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    queue: float
    prefill: float
    decode: float
    stalls: float
    seconds: float
    dollars: float | None


class Invoice(msgspec.Struct, frozen=True):
    """Seconds of `lines` and `idle` add up to `wall`, dollars to `dollars`.

    Attributes:
        lines: the largest first. open: how many of the choices had not ended when the log did.
        wall: from the log's first event to the end of its last step, s.
        idle, idle_dollars: no request is to be billed for.
        shares: what says in which proportion the rows of a step share it.
    """

    lines: list[Line]
    open: int
    wall: float
    idle: float
    dollars: float | None
    idle_dollars: float | None
    shares: str


def invoice(
    path: Path, price: float | None = None, by_request: bool = False, shape: ModelShape | None = None
) -> Invoice:
    """The bill of an event log.

    Args:
        price: dollars per hour of the machine.
        shape: of the model that was served; needed where its steps were predicted by a profile of the machine.

    Raises:
        EventFileError: the file is no event log.
        BadInput: the price is none, or the model is needed.
    """
    if price is not None and not 0 <= price < 1e9:
        raise BadInput("--price", f"{price}; accepted: dollars per hour of the machine, from 0")
    header = read_header(path)
    parts, shares = _parts(header, shape)
    fold = Receipts(parts, header.limits.windows)
    sums: dict[str, tuple[Receipt, list[int]]] = {}
    lengths: dict[str, tuple[int, int]] = {}

    def enter(id: str, receipt: Receipt) -> None:
        name = id if by_request else receipt.tenant
        before, counts = sums.get(name, (Receipt(), [0, 0, 0]))
        more = (1, *lengths.pop(id, (0, 0)))
        sums[name] = before + receipt, [a + b for a, b in zip(counts, more, strict=True)]

    for event in read_events(path):
        fold(event)
        match event:
            case Queued():
                lengths[event.id] = event.prompt_tokens, 0
            case Finished():
                lengths[event.id] = event.prompt_tokens, event.generated
            case StepDone():
                for ended in fold.take_all():
                    enter(*ended)
    for ended in fold.take_all():
        enter(*ended)
    still = list(fold.open())
    for ended in still:
        enter(*ended)
    lines = [_line(name, receipt, counts, price) for name, (receipt, counts) in sums.items()]
    wall, idle = to_seconds(fold.wall), to_seconds(fold.idle)
    return Invoice(
        sorted(lines, key=lambda line: -line.seconds), len(still), wall, idle, _dollars(wall, price),
        _dollars(idle, price), shares,
    )  # fmt: skip


def _line(name: str, receipt: Receipt, counts: list[int], price: float | None) -> Line:
    requests, prompt, generated = counts
    seconds = to_seconds(receipt.billed)
    return Line(
        name, requests, prompt, receipt.cached, receipt.computed, generated, to_seconds(receipt.queue),
        to_seconds(receipt.prefill), to_seconds(receipt.decode), to_seconds(receipt.stalls), seconds,
        _dollars(seconds, price),
    )  # fmt: skip


def _dollars(seconds: float, price: float | None) -> float | None:
    return None if price is None else dollars(seconds, price)


def _parts(header: Header, shape: ModelShape | None) -> tuple[Callable[[StepShape], StepParts], str]:
    """What says how rows share a step, and that in words."""
    if seen := recorded_regimes(header, shape):
        timing = seen[min(header.regime, len(seen) - 1)]
        return timing.model.parts, "the step-time model, with the profile of the machine"
    if header.profile and header.profile.get("costs"):
        return FixedCosts(**header.profile["costs"]).parts, "what the engine's first steps cost"
    return FixedCosts(token=1.0).parts, "the number of tokens: nothing predicted the steps of this log"
