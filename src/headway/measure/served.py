"""Fit the step-time model to the steps of an event log: what an engine did for its users is the best of trials.

A log has no probes of the machine between steps, as `headway probe` makes them: its fit rests on the rates of the
profile, and holds for the machine as it was while it served. Where a load was played for the purpose, the machine was
probed around each part of it (`Window`), and the fits are of the regimes it was in.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from pathlib import Path

import msgspec
import numpy as np

from headway.core.errors import BadInput
from headway.core.events import StepDone
from headway.core.step import StepShape
from headway.engine.event_file import read_events, read_header
from headway.measure.fit import Observation, fit_regimes, residual_of
from headway.roofline.noise import BLOCK, CHUNK, DECODE, KEPT, UNIT
from headway.roofline.profile import MOST_NOISE, Fit, Profile, Rates, covers, device_of, nearest
from headway.roofline.step import StepTime
from headway.roofline.timing import held
from headway.shape.model import ModelShape

KINDS = ("decode", "prompt", "mixed")
MOST_STEPS = 20_000  # the last ones of a log; more would tell nothing new


class Held(msgspec.Struct, frozen=True):
    """Error on steps that were left out of the fit, of one kind of step: median and 90th percentile of
    |predicted / measured - 1|, and the median of predicted / measured - 1."""

    kind: str
    steps: int
    median: float
    p90: float
    bias: float


class Window(msgspec.Struct, frozen=True):
    """Part of a run, ps of the engine's clock, and what the machine gave then."""

    begin: int
    end: int
    rates: Rates


class CalibratedProfile(msgspec.Struct, frozen=True):
    """The profile with what was fitted, the fits themselves, and what they are worth by kind of step."""

    profile: Profile
    backend: str
    formats: tuple[str, ...]
    fits: list[Fit]
    held_out: list[Held]


def calibrate(
    path: Path, shape: ModelShape, profile: Profile, math: str, formats: Sequence[str] = (),
    windows: Sequence[Window] | None = None,
) -> CalibratedProfile:  # fmt: skip
    """Fit to the steps of a log.

    Args:
        shape: of the model that was served. formats: as the backend held its matrices; () = as they are stored.
        profile: of the machine: its rates. math: format that the backend multiplies in.
        windows: the steps to fit on, and the machine's rates then; None = all, at the profile's rates.

    Raises:
        EventFileError: the file is no event log.
        BadInput: it has too few steps, or the profile has no such rate.
    """
    backend = str(read_header(path).config.get("backend", "native"))
    if math not in profile.rates:
        raise BadInput("profile", f"it has no {math} rate; measure the machine with `headway probe`")
    model = StepTime(shape, device_of(profile), math=math)
    usual = Rates(profile.bandwidth, profile.rates[math])
    steps = [
        (event.shape, event.seconds.executor, rates)
        for event in read_events(path)
        if isinstance(event, StepDone) and event.steps == 1 and not event.drafted and event.seconds.executor > 0
        and (rates := _rates(event, windows, usual)) is not None
    ][-MOST_STEPS:]  # fmt: skip
    observations = [Observation(model.work(size), *rates, seconds, _point(size)) for size, seconds, rates in steps]
    points = sorted({one.point for one in observations})
    left_out = set(points[1::2])
    kept = [one for one in observations if one.point not in left_out]
    if not observations or not left_out or len(kept) < 24:
        raise BadInput(
            "LOG", f"{path} has {len(steps)} steps of {len(points)} sizes; serve more requests, of many sizes"
        )
    trial = fit_regimes(kept, math)[0]
    rest = [one for one in observations if one.point in left_out]
    found = _with_noise(fit_regimes(observations, math), observations)
    names = tuple(dict.fromkeys(formats or held(shape)))
    fits = {kind: dict(known) for kind, known in profile.fits.items()}
    for name in names:
        known = fits.setdefault(backend, {}).get(name, []) if windows else []  # of regimes that were not seen now
        fits.setdefault(backend, {})[name] = found + [
            one for one in known if all(not covers(new, one.bandwidth[1]) for new in found)
        ]
    return CalibratedProfile(
        msgspec.structs.replace(profile, fits=fits), backend, names, found,
        [error for kind in KINDS if (error := _error(kind, rest, trial)) is not None],
    )  # fmt: skip


def _with_noise(fits: Sequence[Fit], observations: Sequence[Observation]) -> list[Fit]:
    """Fits that also say how the steps of their regimes varied."""
    found = []
    for one in fits:
        own = [step for step in observations if nearest(fits, step.bandwidth) is one]
        kinds = {DECODE: [step for step in own if step.point.startswith(DECODE)]}
        kinds[CHUNK] = [step for step in own if not step.point.startswith(DECODE)]
        noise = {kind: _factors(steps, one) for kind, steps in kinds.items() if steps}
        found.append(msgspec.structs.replace(one, noise=noise))
    return found


def _factors(steps: Sequence[Observation], fitted: Fit) -> tuple[int, ...]:
    """Measured over predicted times of stretches from all over a log."""
    ratios = UNIT * np.exp(residual_of(steps, fitted.efficiency))
    factors = [int(one) for one in np.clip(np.rint(ratios), 1, MOST_NOISE)]
    if len(factors) <= KEPT:
        return tuple(factors)
    begins = np.linspace(0, len(factors) - BLOCK, KEPT // BLOCK).astype(int)
    return tuple(factor for begin in begins for factor in factors[begin : begin + BLOCK])


def _rates(event: StepDone, windows: Sequence[Window] | None, usual: Rates) -> Rates | None:
    """What the machine gave during a step; None = it is not to be fitted on."""
    if windows is None:
        return usual
    return next((one.rates for one in windows if one.begin <= event.planned and event.now <= one.end), None)


def _error(kind: str, rest: Sequence[Observation], trial: Fit) -> Held | None:
    some = [one for one in rest if one.point.startswith(kind)]
    if not some:
        return None
    off = np.expm1(-residual_of(some, trial.efficiency))
    return Held(
        kind, len(some), float(np.median(np.abs(off))), float(np.quantile(np.abs(off), 0.9)), float(np.median(off))
    )


def _kind(shape: StepShape) -> str:
    if shape.tokens == shape.rows:
        return "decode"
    return "mixed" if any(shape.decode_kv_tokens) else "prompt"


def _point(shape: StepShape) -> str:
    """Steps of about one size: all of them are fitted, or none."""
    return f"{_kind(shape)} {shape.rows} rows, 2^{round(2 * log2(shape.tokens)) / 2} tokens"
