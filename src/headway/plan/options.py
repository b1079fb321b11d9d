"""Options of `headway plan search` as users write them, turned into traffic, targets, devices and prices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from headway.core.errors import BadInput
from headway.core.slo import parse_slo
from headway.engine.references import load_device, load_shape, profile_of
from headway.plan.answers_lists import Search
from headway.plan.finalists import Play, Plays
from headway.plan.quotes import checked_basis, common_basis, own_prices
from headway.plan.search import Wanted, search
from headway.plan.traffic import Target, Traffic, from_trace, of_users
from headway.plan.written import write_deployment
from headway.roofline.hardware import Hardware, hardware_catalogue
from headway.roofline.own_hardware import is_file, read_devices

MOST_FINALISTS = 100


def find(
    model: str, hardware: str, rate: float | None = None, input_tokens: float = 2000, output_tokens: float = 500,
    trace: Path | None = None, cache_hit: float | None = None, ttft_ms: float | None = None,
    tpot_ms: float | None = None, slo: str | None = None, percentile: float = 99.0, precision: str = "stored",
    kv: str | None = None, degrees: Sequence[int] = (1, 2, 4, 8), split: bool = True, budget: float | None = None,
    prices: str | None = None, price_basis: str | None = None, most: int = 10, engine: str = "vllm",
    prefill_hardware: str | None = None, write: Path | None = None, users: float | None = None,
    think_time: float = 30.0, turns: int = 1, finalists: int = 3, play: Play | None = None,
) -> Search:  # fmt: skip
    """`search` with everything as users write it. `play`: plays so many `finalists`; None = nobody does."""
    if not 0 <= finalists <= MOST_FINALISTS:
        raise BadInput("--finalists", f"{finalists}; accepted: a whole number from 0 to {MOST_FINALISTS}")
    own = own_prices(prices)
    among = tuple(own.priced(device) for device in devices(hardware))
    first = tuple(own.priced(device) for device in devices(prefill_hardware)) if prefill_hardware else ()
    basis = checked_basis(price_basis) or common_basis((*among, *first), own.figures)
    wanted = Wanted(
        among, tuple(precision.split(",")), kv, tuple(degrees), split, budget, own.figures, basis, most,
        engine, next((found for name in hardware.split(",") if (found := profile_of(name.strip()))), None), first,
    )  # fmt: skip
    if users is None and turns != 1:
        raise BadInput("--turns", f"{turns} needs --users: it is how often each of them asks in a session")
    if users is None:
        asked = traffic(trace, rate, input_tokens, output_tokens, cache_hit)
    elif rate is not None or trace is not None:
        raise BadInput("--users", "their rate follows from the answers' speed; leave out --rate and --trace")
    else:
        asked = of_users(users, think_time, turns, input_tokens, output_tokens)
        asked = asked if cache_hit is None else msgspec.structs.replace(asked, cache_hit=cache_hit)
    stage = Plays(finalists, play) if play is not None and finalists else None
    answer = search(model, load_shape(model), asked, target(ttft_ms, tpot_ms, slo, percentile), wanted, stage)
    if write is None or not answer.deployments:
        return answer
    return msgspec.structs.replace(answer, written=tuple(write_deployment(answer.deployments[0], write)))


def traffic(
    trace: Path | None, rate: float | None, input_tokens: float, output_tokens: float, cache_hit: float | None
) -> Traffic:
    """Traffic by hand, or a trace's with the given figures in place of its own."""
    if trace is not None:
        read = from_trace(trace, rate)
        return read if cache_hit is None else msgspec.structs.replace(read, cache_hit=cache_hit)
    if rate is None:
        raise BadInput("--rate", "missing; give requests per second, --users, or a --trace")
    return Traffic(rate, input_tokens, output_tokens, cache_hit or 0.0)


def target(ttft_ms: float | None, tpot_ms: float | None, slo: str | None, percentile: float) -> Target:
    """Targets from single options and from `ttft=1s,tpot=50ms`; the single options win."""
    seconds = parse_slo(slo or "", ("ttft", "tpot"))
    if ttft_ms is not None:
        seconds["ttft"] = ttft_ms * 1e-3
    if tpot_ms is not None:
        seconds["tpot"] = tpot_ms * 1e-3
    return Target(seconds.get("ttft"), seconds.get("tpot"), percentile / 100)


def devices(text: str) -> tuple[Hardware, ...]:
    """Devices by name or of a user's file; `all` = every catalogued one that has a price and a peak."""
    if text == "all":
        return tuple(
            device for device in hardware_catalogue().values()
            if device.price and device.peaks and device.name != "h100-rounded-1e15"
        )  # fmt: skip
    found = {}
    for name in map(str.strip, text.split(",")):
        for device in read_devices(name) if is_file(name) else [load_device(name)]:
            found[device.name] = device
    return tuple(found.values())
