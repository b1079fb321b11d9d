"""One request, token by token: what its prompt and each token of its answer take, and what it caches (SPEC E1)."""

from __future__ import annotations

from typing import Any

import msgspec

from headway.core.errors import BadInput
from headway.engine.references import load_device, load_shape
from headway.report.units import gigabytes
from headway.report.units import seconds as duration
from headway.roofline.capacity import memory_plan
from headway.roofline.replica import Replica, deploy
from headway.roofline.step import StepTime, decode_step, prefill_step
from headway.shape.model import ModelShape, kv_bytes

POINTS = 96  # positions of the answer that are priced one by one; between them the price is linear
MOST = 1_000_000  # tokens


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is looked at.

    Attributes:
        prompt, output: tokens.
        cached: leading tokens of the prompt that the prefix cache has, used if `hit`.
        cache: keep keys and values; without, every token computes all before it again.
        grouped: heads share keys and values as the model's makers made them; without, each has its own.
    """

    model: str = "llama-3.1-8b"
    hardware: str = "h100-sxm"
    prompt: int = 1000
    output: int = 300
    cached: int = 0
    cache: bool = True
    grouped: bool = True
    hit: bool = False

    def __post_init__(self) -> None:
        for name, least in (("prompt", 1), ("output", 1), ("cached", 0)):
            if not least <= getattr(self, name) <= MOST:
                raise BadInput(name, f"{getattr(self, name)} is not a number of tokens from {least} to {MOST}")


def answer(asked: Request) -> dict[str, Any]:
    """The request on one device, by bounds: seconds to the first token, of every later one, and cache bytes."""
    shape = load_shape(asked.model)
    if not asked.grouped:
        shape = ungrouped(shape)
    replica = deploy(shape, load_device(asked.hardware), 1, mode=Replica)
    model = replica.step_time()
    reused = min(asked.cached, asked.prompt - 1) if asked.hit and asked.cache else 0
    first = model.predict(prefill_step(replica.shape, asked.prompt - reused, reused))
    positions = _spread(1, asked.output - 1)
    each = [_token(model, asked, asked.prompt + position) for position in positions]
    decode = _area(positions, each)
    kept = kv_bytes(replica.shape, asked.prompt + asked.output - 1) if asked.cache else 0.0
    room = memory_plan(replica).room
    return {
        "model": shape.name, "hardware": replica.hardware.name, "ttft": first, "decode": decode,
        "e2e": first + decode, "tpot": decode / (asked.output - 1) if asked.output > 1 else None,
        "positions": [asked.prompt + position for position in positions], "seconds": each, "reused": reused,
        "computed": asked.prompt - reused, "cache_bytes": kept, "room_bytes": room, "grouped": asked.grouped,
        "heads": shape.heads, "kv_heads": shape.kv_heads, "binds": _binds(model, asked), "fits": kept <= room,
        "see": _see(asked, first, decode, kept, room, reused),
    }  # fmt: skip


def ungrouped(shape: ModelShape) -> ModelShape:
    """The model with a key and a value for each query head (multi-head attention); the weights stay as they are."""
    groups = tuple(
        msgspec.structs.replace(group, heads=shape.heads) if group.kind in ("full", "window") else group
        for group in shape.groups
    )
    if groups == shape.groups:
        raise BadInput("grouped", f"{shape.name} has nothing to ungroup; accepted: on")
    return msgspec.structs.replace(shape, groups=groups, kv_heads=shape.heads)


def _token(model: StepTime, asked: Request, known: int) -> float:
    """Seconds of the step after `known` tokens: of one token that reads them cached, or of all of them anew."""
    return model.predict(decode_step(model.shape, 1, known) if asked.cache else prefill_step(model.shape, known))


def _binds(model: StepTime, asked: Request) -> dict[str, str]:
    last = asked.prompt + asked.output - 1
    return {
        "prefill": model.explain(prefill_step(model.shape, asked.prompt)).binds,
        "decode": model.explain(decode_step(model.shape, 1, last)).binds,
    }


def _spread(first: int, last: int) -> list[int]:
    """Whole numbers from first to last, at most `POINTS`; none if there are none."""
    if last < first:
        return []
    return sorted({first + round((last - first) * index / (POINTS - 1)) for index in range(POINTS)})


def _area(positions: list[int], each: list[float]) -> float:
    """The sum over all whole positions, linear between those that are known."""
    total = sum(each[:1])
    for before, after, a, b in zip(positions, positions[1:], each, each[1:], strict=False):
        steps = after - before
        total += steps * a + (b - a) * (steps + 1) / 2
    return total


def _see(asked: Request, first: float, decode: float, kept: float, room: float, reused: int) -> str:
    share = decode / (first + decode)
    told = f"The first token comes after {duration(first)}"
    if reused:
        told += f", since {reused:,} tokens of the prompt are in the cache"
    told += f"; the other {asked.output - 1:,} take {duration(decode)}, {share:.0%} of the whole."
    if not asked.cache:
        return told + " Without a cache every token computes all before it again."
    more = f" At its end the request holds {gigabytes(kept)} of the {gigabytes(room)} that are left for caches"
    return f"{told}{more}: {room / kept:,.0f} such requests fit." if kept <= room else f"{told}{more}: it does not fit."
