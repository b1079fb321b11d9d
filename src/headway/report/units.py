"""Figures for people: a number with its unit, "-" where there is none. The same on a terminal and on a page."""

from __future__ import annotations

from collections.abc import Iterable


def seconds(value: float | None) -> str:
    """A duration in the unit that reads best."""
    if value is None:
        return "-"
    for limit, scale, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if value < limit:
            return f"{value * scale:.3g} {unit}" if value else "0"
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"


def duration(value: float) -> str:
    """A time to wait for: seconds, minutes or hours."""
    if value < 100:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 6000 else f"{value / 3600:.1f} h"


def count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def decimal(value: float | None) -> str:
    """One decimal below 100, none above."""
    return "-" if value is None else f"{value:,.1f}" if abs(value) < 100 else f"{value:,.0f}"


def times(value: float | None) -> str:
    """A ratio to now; "-" where there is nothing now."""
    return "-" if value is None else f"{value:.2f}x"


def dollars(value: float | None) -> str:
    return "-" if value is None else f"${value:,.2f}" if value >= 0.1 else f"${value:.4f}"


def same_digits(values: Iterable[float]) -> list[str]:
    """Dollars of a column that says so, with the digits that the smallest needs."""
    listed = list(values)
    digits = 2 if min(listed, default=1.0) >= 0.1 else 4
    return [f"{value:,.{digits}f}" for value in listed]


def gigabytes(value: float) -> str:
    return f"{value / 1e9:,.1f} GB"


def metric(value: float, unit: str) -> str:
    """Three figures and a metric prefix: 3.35 TB/s, 989 TFLOP/s."""
    for scale, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def parameters(value: float) -> str:
    """Millions or billions, as model cards write them: 70.6B, 270M."""
    return f"{value / 1e9:.3g}B" if value < 1e12 and value >= 1e9 else metric(value, "").replace(" ", "")


def of_devices(hardware: str, gpus: int, replicas: int = 1) -> str:
    """How many devices of which kind: h100-sxm; 4 h100-sxm; 2 replicas of 4 h100-sxm."""
    one = hardware if gpus == 1 else f"{gpus} {hardware}"
    return one if replicas == 1 else f"{replicas} replicas of {one}"


def yes(value: bool) -> str:
    return "yes" if value else "NO"
