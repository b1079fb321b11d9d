"""Measure this machine, and fit step times per weight format: what goes into a `Profile`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from headway.engine.machine import free_memory
from headway.engine.profile import held_formats
from headway.measure.patience import OutOfTime, Patience
from headway.measure.probe import float32_rate, measure, read_bandwidth
from headway.measure.synthetic import ROUNDS, measure_format, steps
from headway.model.source import Progress
from headway.ops.protocol import Backend
from headway.ops.registry import find_backend
from headway.roofline.profile import Profile, Rates, covers
from headway.shape.model import ModelShape

USUAL = ("q4_0", "q4_1", "q8_0", "q4_k", "q6_k", "bf16", "int8/128", "int4/32")  # formats that `probe` fits
PROBE_BYTES = 128 << 20
PROBE_MATRIX, PROBE_SECONDS = 512, 0.01
PEAK_TRIES = 6


def measure_machine(threads: int) -> Profile:
    """Measure this machine in a few seconds: memory, arithmetic through numpy, and through our kernels if built."""
    rates = {}
    kind = find_backend()
    if kind.probe is not None:
        backend = kind.probe(threads)
        # The best of short tries: a roof is what the machine can do, not what it did while something else ran.
        rates = {format: max(backend.probe_compute(format, 0.05) for _ in range(PEAK_TRIES)) for format in kind.probed}
    return measure(threads, float(free_memory()), rates)


def machine_probe(threads: int, math: str) -> Callable[[], Rates]:
    """What measures, in a tenth of a second, what memory and cores give now: the figures that fits are shares of."""
    kind = find_backend()
    if kind.probe is None:
        return lambda: Rates(read_bandwidth(threads, PROBE_BYTES), float32_rate(PROBE_MATRIX))
    backend = kind.probe(threads)
    return lambda: Rates(backend.probe_bandwidth(PROBE_BYTES, 3), backend.probe_compute(math, PROBE_SECONDS))


def fit_formats(
    profile: Profile,
    backend: str,
    formats: Sequence[str],
    report: Progress = lambda what, done, total: None,
    rounds: int = ROUNDS,
    patience: Patience | None = None,
) -> Profile:
    """The profile with fits of a backend ("native" or "reference") on these formats: about ten seconds for each.

    Args:
        formats: as matrices are held: a storage format, or "int8/128", "int4/32": quantised at load in such groups.
        report: told how many steps are timed, of all.
        rounds: how often each size of step is timed.
        patience: when it runs out, the other formats are left out.

    Raises:
        BadInput: a format is not one.
    """
    makers = {format: _maker(backend, format, profile.threads) for format in formats}
    fits = {kind: dict(found) for kind, found in profile.fits.items()}
    probe_of = partial(machine_probe, profile.threads)
    timed, total = itertools.count(1), steps(rounds) * len(formats)
    what = f"timing made-up models in {', '.join(formats)}"
    for format, (make, stored) in makers.items():
        try:
            found = measure_format(make, stored, probe_of, lambda: report(what, next(timed), total), rounds, patience)
        except OutOfTime:
            break
        known = fits.setdefault(backend, {}).get(format, [])
        others = [one for one in known if all(not covers(new, one.bandwidth[1]) for new in found)]
        fits[backend][format] = found + others
    return msgspec.structs.replace(profile, fits=fits)


def for_regime(
    profile: Profile,
    backend: Backend,
    shape: ModelShape,
    bandwidth: float,
    report: Progress = lambda what, done, total: None,
    rounds: int = ROUNDS,
    patience: Patience | None = None,
) -> Profile:
    """The profile with fits for a regime with this bandwidth, as far as the machine is in it still. What the profile
    does not know at all is not measured."""
    for format in dict.fromkeys(held_formats(shape, backend)):
        known = profile.fits.get(backend.name, {}).get(format)
        given_up = patience is not None and patience.over
        if known and not given_up and not any(covers(one, bandwidth) for one in known):
            report(f"the machine changed its speed since {format} was timed: once more", 0, None)
            profile = fit_formats(profile, backend.name, [format], report, rounds, patience)
    return profile


def _maker(backend: str, format: str, threads: int) -> tuple[Callable[[], Backend], str]:
    """(makes a fresh backend, storage format of the matrices to give it)."""
    kind = find_backend(backend)
    setup, stored = kind.holding(format)
    return lambda: kind.make(replace(setup, threads=threads)), stored
