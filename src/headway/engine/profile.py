"""The measured machine, as the step-time model of a loaded model: what makes a budget in milliseconds possible."""

from __future__ import annotations

import os
from pathlib import Path

from headway.core.errors import BadInput
from headway.engine.machine import free_memory
from headway.model.source import cache_folder
from headway.ops import native
from headway.ops.native.backend import NativeBackend
from headway.roofline.hardware import Hardware
from headway.roofline.probe import Profile, device_of, load_profile, measure
from headway.roofline.shape import ModelShape
from headway.roofline.step import StepTime


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
        rates = {kind: backend.probe_compute(kind) for kind in ("fp32", "bf16", "int8")}
    return measure(threads, float(free_memory()), rates)


def step_time(shape: ModelShape, profile: Profile, math: str) -> StepTime:
    """How long steps of this model take at best on the measured machine, when it multiplies in `math`.

    Raises:
        BadInput: the profile has no rate for `math`.
    """
    device: Hardware = device_of(profile)
    if math not in device.peaks:
        raise BadInput("profile", f"{profile_path()} has no {math} rate; measure again with `headway probe`")
    return StepTime(shape, device, math=math)
