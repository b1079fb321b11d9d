"""What `headway probe` measured of a machine, read back: its rates, and what Headway's own steps reach of them.

A `Profile` is a small JSON file that stands in for a catalogued device; `headway.measure` writes it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import log
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from headway.core.errors import BadInput
from headway.roofline.hardware import Hardware
from headway.roofline.step import Efficiency

VERSION = 4  # of the profile file; raised when its figures mean something else
GAP = 1.25  # a bandwidth this close to the median of a regime belongs to it
MOST_NOISE = 1 << 17  # thousandths of the usual time: a step that took longer was no step
FLIP = 1.15  # probes before and after a step that differ by more say that the machine changed while it ran


class Rates(NamedTuple):
    """What the machine gives at a moment: bytes/s of memory, FLOP/s of the cores in the model's number format."""

    bandwidth: float
    peak: float

    def steady(self, after: Rates) -> bool:
        """Do two probes agree?"""
        return self.change(after) < FLIP

    def change(self, after: Rates) -> float:
        """Factor between two probes, of the rate that changed most."""
        return max(max(pair) / min(pair) for pair in zip(self, after, strict=True))

    def between(self, after: Rates) -> Rates:
        """Of the time between two probes."""
        return Rates((self.bandwidth * after.bandwidth) ** 0.5, (self.peak * after.peak) ** 0.5)


class Fit(msgspec.Struct, frozen=True):
    """Constants of one backend on one weight format, and what they are worth.

    Attributes:
        efficiency: the constants.
        math: number format it multiplies in. peak: median FLOP/s of that format while the steps were measured.
        low, high: 10th and 90th percentile of measured / predicted, of steps left out of the fit.
        error: median of |predicted / measured - 1| of steps left out.
        bandwidth: least, median and most bytes/s that memory gave while the steps were measured.
        steps: how many were fitted.
        mean: of measured / predicted, of steps left out: some take much longer than usual, few much shorter, and the
            constants say what is usual.
        noise: measured / predicted of single steps in thousandths, by kind of step and in their order, as
            `roofline.noise` draws from it; empty where the steps were trials, which say nothing of a server's.
    """

    efficiency: Efficiency
    math: str
    peak: float
    low: float
    high: float
    error: float
    bandwidth: tuple[float, float, float]
    steps: int
    mean: float = 1.0
    noise: dict[str, tuple[Annotated[int, msgspec.Meta(ge=1, le=MOST_NOISE)], ...]] = {}

    @property
    def rates(self) -> Rates:
        """What the machine gave in the median."""
        return Rates(self.bandwidth[1], self.peak)


class Profile(msgspec.Struct, frozen=True):
    """What `headway probe` measured.

    Attributes:
        name: of the machine. created: ISO date. threads: cores used for the rates.
        memory: bytes the engine may use.
        read_bandwidth: bytes/s by number of reading threads (as text, JSON's keys).
        rates: FLOP/s by number format: fp32 through numpy's BLAS, others through Headway's own kernels.
        fits: what Headway's own steps reach of these, by backend and the format it holds weights in, one per regime of
            the machine; empty: only bounds can be told.
        version: of the file's layout.
    """

    name: str
    created: str
    threads: int
    memory: float
    read_bandwidth: dict[str, float]
    rates: dict[str, float]
    fits: dict[str, dict[str, list[Fit]]] = {}
    version: int = VERSION

    @property
    def bandwidth(self) -> float:
        """The best read bandwidth measured."""
        return max(self.read_bandwidth.values())


def nearest(fits: Sequence[Fit], bandwidth: float | None) -> Fit:
    """The fit of the regime that this bandwidth belongs to; None = of the one with most steps."""
    if bandwidth is None:
        return max(fits, key=lambda one: one.steps)
    return min(fits, key=lambda one: abs(log(one.bandwidth[1] / bandwidth)))


def covers(fitted: Fit, bandwidth: float) -> bool:
    """Was this bandwidth of the fit's regime?"""
    return fitted.bandwidth[1] / GAP < bandwidth < fitted.bandwidth[1] * GAP


def device_of(profile: Profile) -> Hardware:
    """The measured machine as a device for the step-time model: its rates are what it reached, not a label's peak."""
    return Hardware(
        name=profile.name, kind="cpu", memory=profile.memory, bandwidth=profile.bandwidth,
        peaks=profile.rates, source="headway probe", date=profile.created,
    )  # fmt: skip


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile.

    Raises:
        BadInput: no such file, or not a profile.
    """
    try:
        raw = msgspec.json.decode(Path(path).read_bytes())
        if isinstance(raw, dict) and "read_bandwidth" in raw and raw.get("version") != VERSION:
            raise BadInput("profile", f"{path} was written by another version of Headway; run `headway probe` again")
        return msgspec.convert(raw, type=Profile)
    except OSError as error:
        raise BadInput("profile", f"{path}: {error.strerror}; make one with `headway probe`") from None
    except msgspec.MsgspecError as error:
        raise BadInput("profile", f"{path} is not a profile written by `headway probe`: {error}") from None
