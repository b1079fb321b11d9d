"""The measured machine as the step-time model of a model: an estimate where steps were fitted, else a bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from headway.roofline.profile import Fit, Profile, Rates, device_of, nearest
from headway.roofline.step import Efficiency, StepTime
from headway.shape.model import ModelShape


class Range(msgspec.Struct, frozen=True):
    """Seconds: the estimate `p50`, and the range that held 80 % of the steps or runs left out of the fit."""

    p10: float
    p50: float
    p90: float

    def at(self, seconds: float) -> Range:
        """A range as wide around another estimate."""
        return Range(*(seconds / self.p50 * end for end in (self.p10, self.p50, self.p90)))


OURS = "native"  # the backend that serves on a measured machine


@dataclass(frozen=True)
class Timing:
    """A step-time model, and what its word is worth.

    Attributes:
        model: says the seconds.
        label: "estimate", or "bound": no step can be faster.
        low, high: 80 % of single steps took between `low` and `high` times the estimate; 1 and 1 for a bound.
        reason: why it is only a bound; "" for an estimate.
        mean: many steps take so many times what the model says, which is what is usual.
        noise: how single steps vary around it, as `Fit.noise`; empty where that is not known.
    """

    model: StepTime
    label: str
    low: float
    high: float
    reason: str
    mean: float = 1.0
    noise: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @classmethod
    def bound(cls, model: StepTime, reason: str) -> Timing:
        """A bound, and why there is no estimate."""
        return cls(model, "bound", 1.0, 1.0, reason)

    @property
    def of_many(self) -> Timing:
        """With a model of what steps take in the mean: for whoever waits for many."""
        if self.mean == 1.0:
            return self
        old = self.model
        model = StepTime(old.shape, old.hardware, math=old.math, efficiency=old.efficiency.slower(self.mean))
        return Timing(model, self.label, min(self.low / self.mean, 1.0), max(self.high / self.mean, 1.0), self.reason)

    def range(self, seconds: float) -> Range:
        """Around an estimate of single steps, or of what is made of them."""
        return Range(seconds * self.low, seconds, seconds * self.high)

    def text(self) -> str:
        """For people."""
        if self.label == "bound":
            return f"predicted by a bound, shorter than any step: {self.reason}"
        return f"estimated, 80 % of steps within {self.low - 1:+.0%} to {self.high - 1:+.0%} of it"


def held(shape: ModelShape) -> tuple[str, str]:
    """The same as the checkpoint stores them."""
    return shape.weight_format, shape.head_format or shape.weight_format


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
    now = now or body.rates
    device = msgspec.structs.replace(device, bandwidth=now.bandwidth, peaks=device.peaks | {body.math: now.peak})
    model = StepTime(shape, device, math=body.math, efficiency=_with_head(body, head, profile.rates))
    return Timing(model, "estimate", body.low, body.high, "", body.mean, body.noise)


def regimes(shape: ModelShape, profile: Profile, backend: str, formats: tuple[str, str]) -> list[Timing]:
    """An estimate for each regime of the machine that the profile has seen, the usual one first; none where steps of
    these formats were not fitted."""
    fits = sorted(profile.fits.get(backend, {}).get(formats[0], []), key=lambda one: -one.steps)
    found = [estimate(shape, profile, backend, formats, one.rates) for one in fits]
    return [one for one in found if one is not None]


def served_here(shape: ModelShape, profile: Profile, roof: StepTime) -> Timing:
    """The estimate of what many steps of our own engine take on a measured machine, or `roof`, the bound of the same
    deployment."""
    return steps_here(shape, profile, roof).of_many


def steps_here(shape: ModelShape, profile: Profile, roof: StepTime) -> Timing:
    """The same of single steps."""
    formats = held(shape)
    if roof.gpus > 1:
        return Timing.bound(roof, "steps were timed on one machine only")
    found = estimate(shape, profile, OURS, formats)
    return found or Timing.bound(roof, not_fitted(profile, OURS, formats))


def _with_head(body: Fit, head: Fit, rates: Mapping[str, float]) -> Efficiency:
    """The body's constants, with the rates of the head's format in the head."""
    if head is body:
        return body.efficiency
    share = head.efficiency.linear * rates[head.math] / rates[body.math]
    return msgspec.structs.replace(body.efficiency, head_stream=head.efficiency.stream, head_linear=share)
