"""Can a measurement be believed? A busy machine shows what others left of it, and looks at it contradict each other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from headway.measure.served import CalibratedProfile
from headway.roofline.profile import Profile, Rates

WAITING = 0.1  # share of the time that a thread may wait for a core
CHANGE = 1.35  # factor between two probes of the arithmetic of an undisturbed machine
ERROR = 0.2  # of predicted steps
SHARE = 1.25  # of a rate that steps may seem to reach: probes are no exact peaks
FEW = 5  # steps that are too few to tell how far off a fit is


class Waiting:
    """How long this thread wanted to compute and got no core, since it was made. Linux only; elsewhere never."""

    def __init__(self, schedstat: Path = Path("/proc/thread-self/schedstat")) -> None:
        self._path = schedstat
        self._began, self._waited = time.monotonic(), self._read()

    def share(self) -> float:
        """Of the time that has passed."""
        return (self._read() - self._waited) / 1e9 / max(time.monotonic() - self._began, 1e-9)

    def _read(self) -> int:
        try:
            return int(self._path.read_text().split()[1])  # ns computed, ns waited, turns
        except (OSError, IndexError, ValueError):
            return 0


def doubts(profile: Profile, formats: Sequence[str], backend: str, waited: float, probes: Sequence[Rates]) -> list[str]:
    """Why a profile should not be saved: one sentence for each reason; none = it can be believed.

    Args:
        formats, backend: what was fitted just now.
        waited: share of the time in which the measuring thread waited for a core.
        probes: of the machine, at the beginning and at the end.
    """
    found = []
    if waited > WAITING:
        found.append(f"other programs are running: for {waited:.0%} of the time there was no core to measure on")
    peaks = [probe.peak for probe in probes]
    if peaks and max(peaks) > CHANGE * min(peaks):
        low, high = min(peaks) / 1e9, max(peaks) / 1e9
        found.append(f"two measurements of the arithmetic disagree: {low:.0f} and {high:.0f} GFLOP/s")
    for name in formats:
        fits = profile.fits.get(backend, {}).get(name, [])
        error = max((fit.error for fit in fits), default=0.0)
        if error > ERROR:
            found.append(f"steps in {name} are missed by {error:.0%}")
        for fit in fits:
            shares = {f"rate of {fit.math}": fit.efficiency.linear, "memory bandwidth": fit.efficiency.stream}
            found += [
                f"steps in {name} reach {share:.0%} of the {of}, which cannot be"
                for of, share in shares.items()
                if share > SHARE
            ]
    return found


def calibration_doubts(found: CalibratedProfile) -> list[str]:
    """The same of what was fitted to an event log, which tells nothing of the machine but its steps."""
    missed = [
        f"{one.kind} steps that were left out of the fit are missed by {one.median:.0%} in the median"
        for one in found.held_out
        if one.steps >= FEW and one.median > ERROR
    ]
    return [*missed, *doubts(found.profile, found.formats, found.backend, 0.0, ())]
