"""The measured machine, as the step-time model of a loaded model: an estimate where steps were fitted, else a bound."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from headway.core.errors import BadInput
from headway.engine.machine import free_memory
from headway.engine.synthetic import measure_format
from headway.engine.trial import Rates
from headway.model.source import cache_folder
from headway.ops import native
from headway.ops.native.backend import NativeBackend
from headway.ops.protocol import Backend
from headway.ops.reference import ReferenceBackend
from headway.ops.weight import FORMATS, GROUPS
from headway.roofline.fit import GAP, Fit, nearest
from headway.roofline.probe import Profile, device_of, float32_rate, load_profile, measure, read_bandwidth
from headway.roofline.shape import ModelShape
from headway.roofline.step import Efficiency, StepTime

USUAL = ("q4_0", "q4_1", "q8_0", "q4_k", "q6_k", "bf16", "int8/128", "int4/32")  # formats that `probe` fits
PROBE_BYTES = 128 << 20
PROBE_MATRIX, PROBE_SECONDS = 512, 0.01
PEAK_TRIES = 6
LOADED_AS = {"fp32": "f32", "fp16": "f16"}  # names of the planner


def profile_path() -> Path:
    """Where `headway probe` leaves what it measured."""
    return cache_folder() / "profile.json"


def saved_profile() -> Profile | None:
    """This machine's profile, if `headway probe` was run; what it holds is in `roofline.probe`."""
    path = profile_path()
    return load_profile(path) if os.path.exists(path) else None  # not there, or in a folder we may not enter


def measure_machine(threads: int) -> Profile:
    """Measure this machine in a few seconds: memory, arithmetic through numpy, and through our kernels if built."""
    rates = {}
    if native.available():
        backend = NativeBackend(threads)
        # The best of short tries: a roof is what the machine can do, not what it did while something else ran.
        rates = {
            kind: max(backend.probe_compute(kind, 0.05) for _ in range(PEAK_TRIES)) for kind in ("fp32", "bf16", "int8")
        }
    return measure(threads, float(free_memory()), rates)


def machine_probe(threads: int, math: str) -> Callable[[], Rates]:
    """What measures, in a tenth of a second, what memory and cores give now: the figures that fits are shares of."""
    if not native.available():
        return lambda: Rates(read_bandwidth(threads, PROBE_BYTES), float32_rate(PROBE_MATRIX))
    backend = NativeBackend(threads)
    return lambda: Rates(backend.probe_bandwidth(PROBE_BYTES, 3), backend.probe_compute(math, PROBE_SECONDS))


def fit_formats(
    profile: Profile, backend: str, formats: Sequence[str], progress: Callable[[str], None] = lambda format: None
) -> Profile:
    """The profile with fits of a backend ("native" or "reference") on these formats: a few seconds for each.

    Args:
        formats: as matrices are held: a storage format, or "int8/128", "int4/32": quantised at load in such groups.
        progress: called with the format after every measured step.

    Raises:
        BadInput: a format is not one.
    """
    makers = {format: _maker(backend, format, profile.threads) for format in formats}
    fits = {kind: dict(found) for kind, found in profile.fits.items()}
    probe_of = partial(machine_probe, profile.threads)
    for format, (make, stored) in makers.items():
        found = measure_format(make, stored, probe_of, partial(progress, format))
        known = fits.setdefault(backend, {}).get(format, [])
        others = [one for one in known if all(not covers(new, one.bandwidth[1]) for new in found)]
        fits[backend][format] = found + others
    return msgspec.structs.replace(profile, fits=fits)


def for_regime(
    profile: Profile,
    backend: Backend,
    shape: ModelShape,
    bandwidth: float,
    say: Callable[[str], None] = lambda text: None,
) -> Profile:
    """The profile with fits for a regime with this bandwidth, as far as the machine is in it still. What the profile
    does not know at all is not measured."""
    for format in dict.fromkeys(held_formats(shape, backend)):
        known = profile.fits.get(backend.name, {}).get(format)
        if known and not any(covers(one, bandwidth) for one in known):
            say(f"the machine changed its speed; timing made-up models in {format} again")
            profile = fit_formats(profile, backend.name, [format])
    return profile


def _maker(backend: str, format: str, threads: int) -> tuple[Callable[[], Backend], str]:
    """(makes a fresh backend, storage format of the matrices to give it)."""
    if backend == "reference":
        return ReferenceBackend, "f32"
    target, _, group = format.partition("/")
    if target in ("int8", "int4") and group in map(str, GROUPS):
        return lambda: NativeBackend(threads, target, int(group)), "bf16"
    if format not in FORMATS:
        accepted = ", ".join([*FORMATS, f"int8/G and int4/G with G one of {GROUPS}"])
        raise BadInput("--formats", f"{format!r} is not a weight format; accepted: {accepted}")
    return lambda: NativeBackend(threads), format


@dataclass(frozen=True)
class Timing:
    """A step-time model, and what its word is worth.

    Attributes:
        model: says the seconds.
        label: "estimate", or "bound": no step can be faster.
        low, high: 90 % of single steps took between `low` and `high` times the estimate; 1 and 1 for a bound.
        reason: why it is only a bound; "" for an estimate.
    """

    model: StepTime
    label: str
    low: float
    high: float
    reason: str

    @classmethod
    def bound(cls, model: StepTime, reason: str) -> Timing:
        """A bound, and why there is no estimate."""
        return cls(model, "bound", 1.0, 1.0, reason)

    def text(self) -> str:
        """For people."""
        if self.label == "bound":
            return f"predicted by a bound, shorter than any step: {self.reason}"
        return f"estimated, 90 % of steps within {self.low - 1:+.0%} to {self.high - 1:+.0%} of it"


def held_formats(shape: ModelShape, backend: Backend) -> tuple[str, str]:
    """How a backend holds a model's matrices: (most of them, the output matrix)."""
    body, head = held(shape)
    return backend.held_as(body), backend.held_as(head, head=True)


def held(shape: ModelShape) -> tuple[str, str]:
    """The same as the checkpoint stores them."""
    body = LOADED_AS.get(shape.weight_format, shape.weight_format)
    return body, LOADED_AS.get(shape.head_format, shape.head_format) or body


def step_time(shape: ModelShape, profile: Profile, backend: Backend, now: Rates | None = None) -> Timing:
    """How long steps of this model take on the measured machine.

    Args:
        shape: of the loaded model, with the bytes that the backend holds.
        backend: what computes them.
        now: what the machine gives now; None = what the profile saw: the best for a bound, the median for an estimate.

    Raises:
        BadInput: the profile has no rate for what the backend multiplies in.
    """
    if backend.math not in profile.rates:
        raise BadInput("profile", f"{profile_path()} has no {backend.math} rate; measure again with `headway probe`")
    formats = held_formats(shape, backend)
    found = estimate(shape, profile, backend.name, formats, now)
    if found is not None:
        return found
    device = device_of(profile)
    device = msgspec.structs.replace(device, bandwidth=max(device.bandwidth, now.bandwidth if now else 0.0))
    model = StepTime(shape, device, math=backend.math)
    return Timing.bound(model, not_fitted(profile, backend.name, formats))


def not_fitted(profile: Profile, backend: str, formats: tuple[str, str]) -> str:
    """Why there is no estimate."""
    known = profile.fits.get(backend, {})
    missing = " and ".join(format for format in dict.fromkeys(formats) if format not in known)
    return f"the profile has no steps of the {backend} backend on {missing}; see `headway probe --formats`"


def estimate(
    shape: ModelShape, profile: Profile, backend: str, formats: tuple[str, str], now: Rates | None = None
) -> Timing | None:
    """The estimate, without a backend at hand; None where steps of these formats were not fitted.

    Args:
        formats: as `held_formats` or `held` says.
    """
    fits = profile.fits.get(backend, {})
    if any(format not in fits for format in formats):
        return None
    body, head = (nearest(fits[format], now.bandwidth if now else None) for format in formats)
    device = device_of(profile)
    now = now or Rates(body.bandwidth[1], body.peak)
    device = msgspec.structs.replace(device, bandwidth=now.bandwidth, peaks=device.peaks | {body.math: now.peak})
    model = StepTime(shape, device, math=body.math, efficiency=_with_head(body, head, profile.rates))
    return Timing(model, "estimate", body.low, body.high, "")


def covers(fitted: Fit, bandwidth: float) -> bool:
    """Was this bandwidth of the fit's regime?"""
    return fitted.bandwidth[1] / GAP < bandwidth < fitted.bandwidth[1] * GAP


def _with_head(body: Fit, head: Fit, rates: Mapping[str, float]) -> Efficiency:
    """The body's constants, with the rates of the head's format in the head."""
    if head is body:
        return body.efficiency
    share = head.efficiency.linear * rates[head.math] / rates[body.math]
    return msgspec.structs.replace(body.efficiency, head_stream=head.efficiency.stream, head_linear=share)
