"""The measured machine, as the step-time model of a loaded model: an estimate where steps were fitted, else a bound."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from headway.core.errors import BadInput
from headway.core.events import Header
from headway.model.source import cache_folder
from headway.ops.protocol import Backend
from headway.roofline.profile import Profile, Rates, device_of, load_profile
from headway.roofline.step import StepTime
from headway.roofline.timing import Timing, estimate, held, not_fitted, regimes
from headway.shape.model import ModelShape


def profile_path() -> Path:
    """Where `headway probe` leaves what it measured."""
    return cache_folder() / "profile.json"


def saved_profile() -> Profile | None:
    """This machine's profile, if `headway probe` was run; what it holds is in `roofline.profile`."""
    path = profile_path()
    return load_profile(path) if os.path.exists(path) else None  # not there, or in a folder we may not enter


def held_formats(shape: ModelShape, backend: Backend) -> tuple[str, str]:
    """How a backend holds a model's matrices: (most of them, the output matrix)."""
    body, head = held(shape)
    return backend.held_as(body), backend.held_as(head, head=True)


def recorded_regimes(header: Header, shape: ModelShape | None) -> list[Timing]:
    """What predicted the steps of a recorded run, by regime; [] where no profile of a machine did.

    Raises:
        BadInput: the model that was served is needed, or the profile has no steps of it.
    """
    known = header.profile or {}
    if "read_bandwidth" not in known:
        return []
    if shape is None:
        raise BadInput("--model", "the steps of this log were predicted by a profile: name the model it served")
    backend = str(header.config.get("backend", "native"))
    try:
        profile = msgspec.convert(known, Profile)
        body, head = msgspec.convert(header.config.get("formats", held(shape)), tuple[str, str])
    except msgspec.ValidationError as error:
        raise BadInput("LOG", f"its header's profile or config is damaged: {error}") from None
    seen = regimes(shape, profile, backend, (body, head))
    if not seen:
        raise BadInput("LOG", f"its profile has no fitted steps of the {backend} backend")
    return seen


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
